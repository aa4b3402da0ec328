"""Prompt embeds of text through the native engine: the answer of the text that they stand for, whatever happens."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file

from tests.engine.test_prompt_embeds import tensor
from tests.generation import embed, sample
from tests.waiting import until
from weft.backends.contract import final_output
from weft.backends.native import NativeEngine, start_native
from weft.config import load
from weft.engine.process import EngineThread, LaunchedEngine, launch_engine
from weft.errors import InvalidRequest, Overloaded
from weft.hub.resolve import resolve
from weft.types import MixedPrompt, Prompt, SamplingParams

PROMPT = [(11 * i) % 200 + 3 for i in range(70)]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1, seed=5, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def embedding(tiny_model: Path) -> np.ndarray:
    """The model's own table."""
    return load_file(tiny_model / "model.safetensors")["model.embed_tokens.weight"]


@pytest.fixture(scope="module")
def mixed(embedding: np.ndarray) -> MixedPrompt:
    """The prompt, as tokens, rows, tokens, rows and tokens."""
    rows = tensor(embedding[PROMPT])
    first, second = tensor(embedding[PROMPT[5:40]]), tensor(embedding[PROMPT[50:69]])
    assert rows.dtype == "float32"
    return MixedPrompt.of([PROMPT[:5], first, PROMPT[40:50], second, PROMPT[69:]])


async def started(model: Path, launch: Callable[[], LaunchedEngine] = EngineThread, **settings: object) -> NativeEngine:
    chosen = {"num_blocks": 64, "max_model_len": 512, "threads": 1, "allow_prompt_embeds": True, **settings}
    return await start_native(load(chosen, env={}), resolve(str(model)), launch=launch)


async def answer(engine: NativeEngine, prompt: Prompt, params: SamplingParams = GREEDY) -> tuple[str, list[int], int]:
    """The text, the tokens, and how many of the prompt were cached."""
    text, tokens = "", list[int]()
    async for output in await engine.submit(sample(prompt, params)):
        text, tokens = text + output.text, tokens + output.token_ids
    assert not output.error and output.usage.prompt_tokens == len(prompt)  # type: ignore[arg-type]
    return text, tokens, output.usage.cached_tokens


def test_chunked_preempted_and_from_the_cache(tiny_model: Path, mixed: MixedPrompt) -> None:
    async def scenario() -> None:
        engine = await started(tiny_model, max_prefill_chunk=16, force_preempt_every=4)
        assert engine.model.embeds_width == 96
        expected = [(await answer(engine, PROMPT, params))[:2] for params in (GREEDY, SAMPLED)]
        first, *both = await asyncio.gather(*(answer(engine, mixed, params) for params in (GREEDY, GREEDY, SAMPLED)))
        assert [one[:2] for one in (first, *both)] == [expected[0], *expected]
        assert (await answer(engine, mixed))[2] == 64, "equal rows are found"
        assert engine.stats().preemptions > 0 and engine.stats().embedding_bytes == 0
        await engine.close()

    asyncio.run(scenario())


def test_killed_in_mid_stream_they_go_on_byte_for_byte(tiny_model: Path, mixed: MixedPrompt) -> None:
    long = replace(GREEDY, max_tokens=400)

    async def scenario() -> None:
        engine = await started(tiny_model, launch_engine)
        expected = [(await answer(engine, PROMPT, replace(long, temperature=t, seed=3)))[:2] for t in (0, 1)]
        before = engine.stats().generation_tokens
        streams = [asyncio.create_task(answer(engine, mixed, replace(long, temperature=t, seed=3))) for t in (0, 1)]
        await until(lambda: engine.stats().generation_tokens > before + 20)
        assert engine.stats().embedding_bytes == 2 * 54 * 96 * 4
        os.kill(engine.client.engine_pid, signal.SIGKILL)
        assert [one[:2] for one in await asyncio.gather(*streams)] == expected
        assert engine.stats().restarts == 1 and engine.stats().embedding_bytes == 0
        await engine.close()

    asyncio.run(scenario())


def test_who_exceeds_the_budget_waits_and_too_many_are_told_to_come_back(
    tiny_model: Path, embedding: np.ndarray
) -> None:
    """Five payloads of 192,000 bytes fit in a budget of 1 MiB, ten in twice of that."""
    places = range(500)
    prompts = [MixedPrompt.of([tensor(embedding[[(i + 7 * at) % 300 for at in places]])]) for i in range(11)]

    async def scenario() -> None:
        engine = await started(tiny_model, max_embedding_mb=1, num_blocks=400)
        params = replace(GREEDY, max_tokens=10)
        expected = [(await answer(engine, prompt, params))[1] for prompt in prompts[:6]]
        streams = [await engine.submit(sample(prompt, params)) for prompt in prompts[:10]]
        with pytest.raises(Overloaded, match="--max-embedding-mb"):
            await engine.submit(sample(prompts[10], params))
        most = 0
        answers = [list[int]() for _ in streams]
        for tokens, stream in zip(answers, streams, strict=True):
            async for output in stream:
                tokens += output.token_ids
                most = max(most, engine.stats().embedding_bytes)
        assert answers[:6] == expected and len(answers[9]) == 10, "the sixth waited, and then ran"
        assert most == 5 * 192_000 and engine.stats().embedding_bytes == 0
        await engine.close()

    asyncio.run(scenario())


def test_what_can_never_be_computed_is_refused(tiny_model: Path, mixed: MixedPrompt, embedding: np.ndarray) -> None:
    narrow = MixedPrompt.of([tensor(embedding[:4, :5].copy())])

    async def refusal(engine: NativeEngine, prompt: MixedPrompt, params: SamplingParams = GREEDY) -> str:
        with pytest.raises(InvalidRequest) as refused:
            await final_output(await engine.submit(sample(prompt, params)))
        assert engine.stats().open_requests == 0
        return refused.value.message

    async def scenario() -> None:
        engine = await started(tiny_model)
        assert "rows have 96 values" in await refusal(engine, narrow)
        assert "prompt_logprobs" in await refusal(engine, mixed, replace(GREEDY, prompt_logprobs=1))
        with pytest.raises(InvalidRequest, match="Only requests for tokens"):
            await engine.submit(embed(mixed))
        await engine.close()
        engine = await started(tiny_model, allow_prompt_embeds=False)
        assert engine.model.embeds_width == 0
        assert "takes no prompt embeds" in await refusal(engine, mixed)
        await engine.close()

    asyncio.run(scenario())
