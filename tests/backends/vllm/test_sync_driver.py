"""vLLM's synchronous engine, stepped by a thread, on a CPU: what cuda-vllm is."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.backends.vllm.groups import group_of
from tests.backends.vllm.real import (
    Answered,
    answer,
    ask,
    config_of,
    eager,
    host_of,
    needs_vllm,
)
from tests.generation import sample
from tests.waiting import wait_until
from weft.backends.blocking import BlockingEngine
from weft.backends.vllm.arguments import CPU
from weft.backends.vllm.vllm_engine import start_kind
from weft.checkpoint.adapter_files import adapter_settings
from weft.types import FinishReason, ResetPrefixCache, SamplingParams

pytestmark = needs_vllm

PROMPT = [5, 6, 7]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def vllm(vllm_model: Path, adapters: dict[str, str]) -> Iterator[BlockingEngine]:
    restore = eager()
    config, kind = config_of(vllm_model, adapter=adapter_settings(adapters)), replace(CPU, synchronous=True)
    with BlockingEngine(lambda: start_kind(config, kind)) as blocking:
        yield blocking
    restore()


def test_it_answers_as_the_native_engine_and_as_tokens_come(vllm: BlockingEngine, native: BlockingEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    mine, theirs = ask(vllm, PROMPT, params), ask(native, PROMPT, params)
    assert mine.token_ids == theirs.token_ids and mine.last.finish is FinishReason.LENGTH
    assert len(mine.deltas) > 1
    assert [score.logprob for score in mine.logprobs] == pytest.approx(
        [score.logprob for score in theirs.logprobs], abs=1e-4
    )
    assert mine.deltas[0].prompt_logprobs is not None and mine.deltas[0].queue_seconds is not None


def test_many_requests_are_in_one_batch(vllm: BlockingEngine) -> None:
    prompts = [[5 + i, 6, 7] for i in range(16)]
    alone = [ask(vllm, prompt, GREEDY).token_ids for prompt in prompts]
    before = vllm.engine.stats()

    async def together() -> list[Answered]:
        return await asyncio.gather(*(answer(vllm.engine, prompt, GREEDY) for prompt in prompts))

    assert [got.token_ids for got in vllm.wait(together())] == alone
    assert vllm.engine.stats().steps - before.steps < 16 * 24 / 4


def test_what_is_refused_ends_alone(vllm: BlockingEngine) -> None:
    got = ask(vllm, PROMPT, SamplingParams(max_tokens=5, grammar="start: missing_rule\n%llguidance {}\n"))
    assert got.last.finish is FinishReason.REJECTED and "missing_rule" in got.last.error
    assert ask(vllm, PROMPT, GREEDY).last.finish is FinishReason.LENGTH


def test_leaving_ends_a_request(vllm: BlockingEngine) -> None:
    async def leave() -> None:
        deltas = await vllm.engine.submit(sample(PROMPT, LONG))
        await anext(deltas)
        await deltas.aclose()

    vllm.wait(leave())
    wait_until(lambda: vllm.engine.stats().running == 0, "nothing runs")
    assert vllm.wait(vllm.engine.control(ResetPrefixCache())) == "0", "only an engine without requests forgets"


def test_tc_008_adapters_are_switched_by_the_request(vllm: BlockingEngine) -> None:
    told = [tuple(ask(vllm, PROMPT, GREEDY, adapter=name).token_ids) for name in ("", "red", "blue", "red", "")]
    assert len(set(told)) == 3 and told[0] == told[4] and told[1] == told[3]


def test_a_process_that_is_killed_is_replaced_and_the_stream_goes_on(vllm: BlockingEngine) -> None:
    """The last of this file."""
    whole, first = ask(vllm, PROMPT, LONG), host_of(vllm)

    async def interrupted() -> list[int]:
        tokens: list[int] = []
        async for delta in await vllm.engine.submit(sample(PROMPT, LONG)):
            if not tokens:
                os.kill(first, signal.SIGKILL)
            tokens += delta.token_ids
        return tokens

    assert vllm.wait(interrupted()) == whole.token_ids
    assert vllm.engine.stats().restarts == 1
    assert group_of(first) == {}, "its worker has ended with it"
    second = host_of(vllm)
    vllm.close()
    assert group_of(second) == {}
