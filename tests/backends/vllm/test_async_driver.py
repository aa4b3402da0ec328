"""vLLM's asynchronous engine on a CPU, against the native engine with the same weights: `make show-vllm-engine`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.vllm.groups import group_of
from tests.backends.vllm.real import (
    Answered,
    answer,
    ask,
    config_of,
    eager,
    engine_core,
    host_of,
    needs_vllm,
    save_adapter,
    save_merged,
)
from tests.generation import embed, sample
from tests.waiting import wait_until
from weft.backends.blocking import BlockingEngine
from weft.backends.contract import NotSupported
from weft.backends.native import start_native
from weft.backends.vllm.vllm_engine import start
from weft.checkpoint.adapter_files import adapter_settings
from weft.errors import ContextTooLong, InvalidRequest, ModelError
from weft.text.grammars.lark import GrammarWriter
from weft.text.grammars.specs import ChoiceSpec, JsonSchemaSpec, RegexSpec
from weft.types import FinishReason, LoadLora, ResetPrefixCache, SamplingParams, StartProfile, UnloadLora

pytestmark = needs_vllm

PROMPTS = [[5, 6, 7], [1, 260, 261, 262, 300], [(7 * i + 1) % 256 for i in range(300)]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **fields})


@pytest.fixture(scope="module")
def vllm(vllm_model: Path, adapters: dict[str, str]) -> Iterator[BlockingEngine]:
    restore = eager()
    config = config_of(vllm_model, engine="cpu-vllm", max_num_seqs=16, adapter=adapter_settings(adapters))
    with BlockingEngine(lambda: start(config)) as blocking:
        yield blocking
    restore()


def test_it_says_what_it_is(vllm: BlockingEngine) -> None:
    engine, model = vllm.engine, vllm.engine.model
    assert engine.name == "cpu-vllm" and engine.health().ready
    assert (model.device, model.dtype, model.max_model_len, model.logits_width) == ("cpu", "float32", 512, 320)
    assert model.num_blocks > 0 and model.block_size > 0 and model.load_seconds > 0
    assert engine.abilities.lora and engine.abilities.grammar
    assert not engine.abilities.embeddings and not engine.abilities.images


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "specials", "long"])
def test_greedy_answers_are_the_native_engines(vllm: BlockingEngine, native: BlockingEngine, prompt: list[int]) -> None:
    mine, theirs = ask(vllm, prompt, GREEDY), ask(native, prompt, GREEDY)
    assert mine.token_ids == theirs.token_ids and mine.text == theirs.text
    assert mine.last.finish is FinishReason.LENGTH
    assert mine.last.usage.prompt_tokens == len(prompt) and mine.last.usage.completion_tokens == 24
    assert len(mine.deltas) > 1, "as they come, and not at the end"


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.0},
        {"logit_bias": {50: 100.0, 51: -100.0}},
        {"stop_token_ids": (201,)},
        {"stop_token_ids": (201,), "min_tokens": 10},
        {"max_tokens": 3},
        {"ignore_eos": False, "logit_bias": {2: 100.0}},
        {"skip_special_tokens": False, "logit_bias": {1: 100.0}, "max_tokens": 2},
    ],
    ids=lambda asked: ",".join(asked),
)
def test_every_parameter_means_what_it_means_to_the_native_engine(
    vllm: BlockingEngine, native: BlockingEngine, asked: dict[str, Any]
) -> None:
    params, plain = greedy(**asked), ask(vllm, PROMPTS[0], GREEDY)
    mine, theirs = ask(vllm, PROMPTS[0], params), ask(native, PROMPTS[0], params)
    assert (mine.token_ids, mine.text) == (theirs.token_ids, theirs.text)
    assert (mine.last.finish, mine.last.stop_reason) == (theirs.last.finish, theirs.last.stop_reason)
    assert mine.last.usage == theirs.last.usage
    assert mine.token_ids != plain.token_ids, "the parameter was not tested"


def test_log_probabilities_are_the_native_engines(vllm: BlockingEngine, native: BlockingEngine) -> None:
    params = greedy(logprobs=3, prompt_logprobs=2, max_tokens=6)
    mine, theirs = (ask(engine, PROMPTS[1], params) for engine in (vllm, native))
    first, other = mine.deltas[0].prompt_logprobs, theirs.deltas[0].prompt_logprobs
    assert first is not None and other is not None and len(first) == len(PROMPTS[1]) - 1
    for score, wanted in zip([*mine.logprobs, *first], [*theirs.logprobs, *other], strict=True):
        assert score.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [token for token, _ in score.top] == [token for token, _ in wanted.top]
        assert [value for _, value in score.top] == pytest.approx([value for _, value in wanted.top], abs=1e-4)


def test_a_seed_repeats_an_answer(vllm: BlockingEngine) -> None:
    def drawn(seed: int | None) -> list[int]:
        return ask(vllm, PROMPTS[0], SamplingParams(temperature=1, seed=seed, max_tokens=12, ignore_eos=True)).token_ids

    assert drawn(5) == drawn(5) != drawn(6)
    assert drawn(-1) == drawn(-1), "which means none to vLLM itself"
    assert drawn(None) != drawn(None)


def test_a_stop_string_ends_it_here_and_in_vllm(vllm: BlockingEngine) -> None:
    plain = ask(vllm, PROMPTS[0], greedy(max_tokens=200))
    stop = next(pair for i in range(8, 100) if (pair := plain.text[i : i + 2]).isascii())
    cut = ask(vllm, PROMPTS[0], greedy(max_tokens=200, stop=(stop,)))
    assert cut.text == plain.text[: plain.text.index(stop)]
    assert (cut.last.finish, cut.last.stop_reason) == (FinishReason.STOP, stop)
    assert cut.last.usage.completion_tokens < 200
    wait_until(lambda: vllm.engine.stats().running == 0, "nothing runs")


def test_structured_output_keeps_to_its_form(vllm: BlockingEngine) -> None:
    writer = GrammarWriter({}, max_schema_depth=8)
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    for spec, fits in (
        (ChoiceSpec(options=("warp", "weft")), r"warp|weft"),
        (RegexSpec(pattern="[a-c]{3}-[0-9]{2}"), r"[a-c]{3}-[0-9]{2}"),
        (JsonSchemaSpec(schema=schema), r"\{\s*\"n\"\s*:\s*[12]\s*\}"),
    ):
        params = SamplingParams(temperature=1, seed=1, max_tokens=100, grammar=writer.write(spec))
        got = ask(vllm, PROMPTS[0], params)
        assert got.last.finish is FinishReason.STOP, got.last
        assert re.fullmatch(fits, got.text), got.text


def test_a_form_that_is_none_is_the_requests_fault(vllm: BlockingEngine) -> None:
    got = ask(vllm, PROMPTS[0], SamplingParams(max_tokens=5, grammar="start: missing_rule\n%llguidance {}\n"))
    assert got.last.finish is FinishReason.REJECTED and "missing_rule" in got.last.error


def test_leaving_ends_a_request_at_once(vllm: BlockingEngine) -> None:
    async def leave() -> None:
        deltas = await vllm.engine.submit(sample(PROMPTS[0], greedy(max_tokens=400)))
        async for _ in deltas:
            break
        await deltas.aclose()

    vllm.wait(leave())
    assert vllm.engine.stats().open_requests == 0
    before = vllm.engine.stats().generation_tokens
    wait_until(lambda: vllm.engine.stats().running == 0, "nothing runs")
    assert vllm.engine.stats().generation_tokens < before + 100, "it went on"


def test_sixteen_at_once_are_batched_and_each_is_as_alone(vllm: BlockingEngine) -> None:
    prompts = [[5 + i, 6, 7] for i in range(16)]
    alone = [ask(vllm, prompt, GREEDY).token_ids for prompt in prompts]
    before = vllm.engine.stats()

    async def together() -> list[Answered]:
        return await asyncio.gather(*(answer(vllm.engine, prompt, GREEDY) for prompt in prompts))

    assert [got.token_ids for got in vllm.wait(together())] == alone
    now = vllm.engine.stats()
    assert now.generation_tokens - before.generation_tokens == 16 * 24
    assert now.steps - before.steps < 16 * 24 / 4, "they were computed one after the other"


def test_prompts_that_begin_alike_share_their_beginning_unless_salted(vllm: BlockingEngine) -> None:
    prompt = [(11 * i + 3) % 256 for i in range(300)]

    def cached(**more: Any) -> int:
        return ask(vllm, prompt, greedy(max_tokens=2), **more).last.usage.cached_tokens

    assert cached() == 0 and cached() > 0
    assert cached(cache_salt="another") == 0
    assert vllm.wait(vllm.engine.control(ResetPrefixCache())) == "0", "vLLM does not tell how many"
    assert cached() == 0


def test_tc_008_adapters_are_switched_by_the_request(
    vllm: BlockingEngine, vllm_model: Path, adapters: dict[str, str], tmp_path: Path
) -> None:
    def told(adapter: str) -> list[int]:
        return ask(vllm, PROMPTS[0], GREEDY, adapter=adapter).token_ids

    plain, red, blue = told(""), told("red"), told("blue")
    assert len({tuple(plain), tuple(red), tuple(blue)}) == 3
    assert (told("red"), told("blue"), told("")) == (red, blue, plain)

    async def together() -> list[Answered]:
        names = ("red", "", "blue", "red")
        return await asyncio.gather(*(answer(vllm.engine, PROMPTS[0], GREEDY, adapter=name) for name in names))

    assert [got.token_ids for got in vllm.wait(together())] == [red, plain, blue, red], "in one batch"
    merged = save_merged(tmp_path / "merged", vllm_model, Path(adapters["red"]))
    with BlockingEngine(lambda: start_native(config_of(merged, device="cpu", threads=1))) as weighed:
        assert ask(weighed, PROMPTS[0], GREEDY).token_ids == red, "W + 2BA"


def test_adapters_come_and_go(vllm: BlockingEngine, vllm_model: Path, tmp_path: Path) -> None:
    vllm.wait(vllm.engine.control(LoadLora("green", str(save_adapter(tmp_path / "green", vllm_model, 7)))))
    assert [adapter.number for adapter in vllm.engine.adapters] == [1, 2, 3]
    assert ask(vllm, PROMPTS[0], GREEDY, adapter="green").last.finish is FinishReason.LENGTH
    vllm.wait(vllm.engine.control(UnloadLora("green")))
    with pytest.raises(InvalidRequest, match="There are: red, blue"):
        ask(vllm, PROMPTS[0], GREEDY, adapter="green")
    broken = save_adapter(tmp_path / "broken", vllm_model, 8)
    facts = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps({**facts, "use_dora": True}))
    with pytest.raises(ModelError, match=r"cannot use the adapter broken.*vLLM"):
        vllm.wait(vllm.engine.control(LoadLora("broken", str(broken))))
    assert [adapter.name for adapter in vllm.engine.adapters] == ["red", "blue"]
    assert vllm.engine.stats().restarts == 0, "and nobody else's"


def test_what_it_cannot_is_refused(vllm: BlockingEngine) -> None:
    with pytest.raises(NotSupported):
        vllm.wait(vllm.engine.submit(embed(PROMPTS[0])))
    with pytest.raises(InvalidRequest, match="empty"):
        ask(vllm, [], GREEDY)
    with pytest.raises(ContextTooLong):
        ask(vllm, [5] * 512, GREEDY)
    with pytest.raises(InvalidRequest, match="profiler"):
        vllm.wait(vllm.engine.control(StartProfile("/nowhere")))


def test_priorities_and_times_are_told(vllm: BlockingEngine) -> None:
    got = ask(vllm, PROMPTS[0], GREEDY, priority=-3)
    assert got.deltas[0].queue_seconds is not None and got.deltas[0].queue_seconds >= 0


def test_a_core_that_is_killed_is_replaced_and_the_stream_goes_on(vllm: BlockingEngine) -> None:
    """The last of this file: another vLLM answers from here on."""
    params = greedy(max_tokens=300)
    whole = ask(vllm, PROMPTS[0], params)
    host, processes = host_of(vllm), group_of(host_of(vllm))
    assert len(processes) >= 3, "the host, the core, the worker"

    async def interrupted() -> list[int]:
        tokens: list[int] = []
        async for delta in await vllm.engine.submit(sample(PROMPTS[0], params)):
            if not tokens:
                os.kill(engine_core(host), signal.SIGKILL)
            tokens += delta.token_ids
        return tokens

    form = SamplingParams(max_tokens=300, grammar="start: /a{300}/\n%llguidance {}\n")

    async def both() -> tuple[list[int], Answered]:
        return await asyncio.gather(interrupted(), answer(vllm.engine, PROMPTS[1], form))

    tokens, formed = vllm.wait(both())
    assert tokens == whole.token_ids, "no token twice, none left out"
    assert vllm.engine.stats().restarts == 1 and vllm.engine.health().ready
    if formed.last.finish is FinishReason.ERROR:
        assert "structured" in formed.last.error
    else:
        assert formed.text == "a" * 300
    assert group_of(host) == {}, "nothing of the first vLLM is left"
    assert ask(vllm, PROMPTS[0], GREEDY, adapter="red").last.finish is FinishReason.LENGTH

    second = host_of(vllm)
    vllm.close()
    assert group_of(second) == {}
