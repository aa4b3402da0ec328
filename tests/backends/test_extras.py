"""Vectors, scored prompts, siblings and queueing times, from the contract down to an engine process and back."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np

from tests.generation import embed, sample
from weft.backends.contract import final_output
from weft.backends.native import NativeStream, start_native
from weft.config import load
from weft.hub.resolve import resolve
from weft.types import Output, SamplingParams

PROMPT = [(7 * i + 1) % 256 for i in range(100)]
SEEDED = SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True)


async def deltas_of(stream: NativeStream) -> list[Output]:
    return [delta async for delta in stream]


def test_what_an_engine_process_gives(tiny_model: Path) -> None:
    async def scenario() -> None:
        config = load({"device": "cpu", "num_blocks": 100, "max_model_len": 256, "threads": 1}, env={})
        engine = await start_native(config, resolve(str(tiny_model)))
        try:
            mean = await final_output(await engine.submit(embed(PROMPT)))
            assert abs(np.linalg.norm(np.frombuffer(mean.embedding, np.float32)) - 1) < 1e-5
            assert mean.usage.prompt_tokens == 100 and mean.usage.completion_tokens == 0

            asked = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=2)
            first, *others = await deltas_of(await engine.submit(sample(PROMPT, asked)))
            assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 99
            assert {len(score.top) for score in first.prompt_logprobs} == {2}
            assert first.queue_seconds is not None and first.queue_seconds >= 0
            assert all(delta.prompt_logprobs is None and delta.queue_seconds is None for delta in others)

            before = engine.stats().prompt_tokens
            leader = await engine.submit(sample(PROMPT, SEEDED, request_id="leader"))
            family = [leader, *[await engine.submit(sample(PROMPT, SEEDED, sibling_of="leader")) for _ in range(3)]]
            answers = await asyncio.gather(*map(deltas_of, family))
            assert len({tuple(token for delta in answer for token in delta.token_ids) for answer in answers}) == 1
            assert engine.stats().prompt_tokens == before + 100

            assert engine.client.engine_pid is not None
            os.kill(engine.client.engine_pid, signal.SIGKILL)
            again = await final_output(await engine.submit(embed(PROMPT)))
            assert again.embedding == mean.embedding and engine.stats().restarts == 1
        finally:
            await engine.close()

    asyncio.run(scenario())
