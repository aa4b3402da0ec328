"""Real vLLM that is short of memory, that dies for good in mid-stream, and that cannot read the model: what takes over.
Where it is missing or cannot be imported is in tests/e2e/test_fault_matrix.py."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.backends.vllm.groups import group_of
from tests.backends.vllm.real import Heard, config_of, eager, needs_vllm
from tests.generation import sample
from weft.backends import start_engine
from weft.backends.blocking import BlockingEngine
from weft.backends.failover import FailoverEngine
from weft.types import FinishReason, SamplingParams

pytestmark = needs_vllm

PROMPT = [5, 6, 7]
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
TOO_LONG = 2**20


@pytest.fixture(scope="module")
def heard() -> Iterator[Heard]:
    handler = Heard()
    logging.getLogger("weft").addHandler(handler)
    yield handler
    logging.getLogger("weft").removeHandler(handler)


@pytest.fixture(scope="module")
def served(long_model: Path, heard: Heard) -> Iterator[BlockingEngine]:
    """Asked for a context for which there is no memory. Its process may not be replaced; native stands behind it."""
    restore = eager()
    more = {"max_model_len": TOO_LONG, "kv_cache_memory_mb": 16, "max_restarts": 0, "image_model": "none"}
    config = config_of(long_model, engine="cpu-vllm,native", **more)
    with BlockingEngine(lambda: start_engine(config)) as blocking:
        yield blocking
    restore()


def test_short_of_memory_it_is_tried_with_less(served: BlockingEngine, heard: Heard) -> None:
    assert served.engine.name == "cpu-vllm"
    assert 300 < served.engine.model.max_model_len < TOO_LONG
    assert any(said.startswith("It does not fit (as asked)") for said in heard.said)
    assert any(said.startswith("It is tried with less: --max-model-len") for said in heard.said)


def test_killed_for_good_in_mid_stream_the_next_engine_goes_on(served: BlockingEngine, heard: Heard) -> None:
    hybrid = served.engine
    assert isinstance(hybrid, FailoverEngine)
    host: int = hybrid._engine.client.engine_pid  # type: ignore[attr-defined]

    async def answered(*, kill: bool) -> list[int]:
        tokens: list[int] = []
        async for delta in await hybrid.submit(sample(PROMPT, LONG)):
            if kill and not tokens:
                os.kill(host, signal.SIGKILL)
            tokens += delta.token_ids
        assert delta.finish is FinishReason.LENGTH and not delta.error
        return tokens

    whole = served.wait(answered(kill=False))
    assert served.wait(answered(kill=True)) == whole, "no token twice, none left out"
    assert hybrid.name == "native" and hybrid.health().ready and group_of(host) == {}
    assert "The engine native has taken over from cpu-vllm." in heard.said


def test_a_model_that_it_cannot_read_is_the_next_engines(
    tiny_gguf: Callable[[str, str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tiny_gguf("smollm2", "F32"), engine="cpu-vllm,native", image_model="none")

    async def go() -> str:
        engine = await start_engine(config)
        await engine.close()
        return engine.name

    assert asyncio.run(go()) == "native"
    [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "cpu-vllm: ModelError: " in warning and "GGUF" in warning
