"""Ranks on GPUs give what one gives. Where there are fewer GPUs than ranks, they share one: all code of ranks runs, and
none of the speed is that of several GPUs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests import tiny_models
from tests.gpu.client_requests import PROMPTS, end_of, requests
from tests.processes import descendants
from tests.tiny_adapters import save_adapter
from tests.waiting import until
from weft.bench.mixed import without
from weft.config import load
from weft.engine.client import EngineClient
from weft.hub.resolve import resolve
from weft.switches import SHARED_GPU
from weft.types import Adapter, FinishReason, Request, SamplingParams

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_GPU, "1")


async def tokens_of(client: EngineClient, asked: list[Request]) -> list[list[int]]:
    entries = [client.submit(one) for one in asked]
    ends = await asyncio.gather(*map(end_of, entries))
    assert {end.finish for end in ends} == {FinishReason.LENGTH}
    return [list(entry.delivered) for entry in entries]


@asynccontextmanager
async def serving(model: Path, size: int, **settings: object) -> AsyncIterator[EngineClient]:
    """Serve with so many ranks, once nothing is left to prepare."""
    shared = {"device": "cuda", "dtype": "float32", "max_model_len": 256, "num_blocks": 256, "max_num_seqs": 12}
    shared |= {"image_model": "none", "tensor_parallel_size": size, "heartbeat_timeout_s": 60.0}
    client = EngineClient(load(shared | settings, env={}), resolve(str(model)))
    await client.start()
    try:
        await until(lambda: client.stats().prepared, "prepared steps")
        yield client
    finally:
        await client.close()


def with_ranks(model: Path, size: int, **settings: object) -> list[list[int]]:
    """Return the tokens of requests; a second time they are the same, with a cache that knows the prompts."""

    async def scenario() -> list[list[int]]:
        async with serving(model, size, **settings) as client:
            first = await tokens_of(client, requests("first"))
            assert await tokens_of(client, requests("second")) == first
            assert client.stats().prefix_hits > 0
            assert client.restarts == 0
            return first

    return asyncio.run(scenario())


def test_sums_are_right_and_have_the_same_bits_on_all_ranks() -> None:
    subprocess.run([sys.executable, "-m", "tests.gpu.bench_all_reduce", "ranks", "2"], check=True, timeout=300)


@pytest.mark.parametrize("name", tiny_models.SPECS)
def test_two_ranks_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    model = tiny_models.save_directory(name, tmp_path / name)
    assert with_ranks(model, 2) == with_ranks(model, 1)


@pytest.mark.parametrize("switches", [("one-shot",), ("graphs",), ("one-shot", "graphs")], ids=str)
def test_what_is_switched_off_changes_no_token(switches: tuple[str, ...], tmp_path: Path) -> None:
    """NCCL adds up in graphs as well as kernel by kernel."""
    model = tiny_models.save_directory("llama3", tmp_path / "llama3")
    expected = with_ranks(model, 1)
    with without(*switches):
        assert with_ranks(model, 2) == expected


def test_adapters_are_loaded_by_both_ranks(tmp_path: Path) -> None:
    """With graphs of steps that have adapters, which both capture once these are there."""
    model = tiny_models.save_directory("llama3", tmp_path / "llama3")
    folders = [save_adapter("llama3", tmp_path / str(seed), seed) for seed in (1, 2)]
    adapters = [Adapter(name=f"style {i}", number=i, path=str(one)) for i, one in enumerate(folders, 1)]

    def answers(size: int) -> list[list[int]]:
        async def scenario() -> list[list[int]]:
            async with serving(model, size, max_loras=2) as client:
                asked = [one for adapter in (None, *adapters) for one in requests(f"of {adapter}", 12, adapter)]
                first = await tokens_of(client, asked)
                assert await tokens_of(client, requests("again", 12, adapters[1])) == first[16:]
                return first

        return asyncio.run(scenario())

    expected = answers(1)
    assert len({tuple(one) for one in expected}) > 12, "each has words of its own"
    assert answers(2) == expected


def test_layers_as_large_as_a_7b_models_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks round their sums otherwise: log probabilities stay within bfloat16's reach of those of one, with and
    without the one-shot all-reduce."""
    layers = tiny_models.Spec(hidden=4096, middle=11008, layers=2, heads=32, kv_heads=32, head_dim=128)
    monkeypatch.setitem(tiny_models.SPECS, "layers of 7b", layers)
    model = tiny_models.save_directory("layers of 7b", tmp_path / "layers")

    def logprobs(size: int) -> list[float]:
        async def scenario() -> list[float]:
            async with serving(model, size, dtype="bfloat16") as client:
                await tokens_of(client, requests("decoded"))
                params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
                scored = Request(request_id="scored", prompt_token_ids=PROMPTS[1], params=params)
                event = await end_of(client.submit(scored))
                return [one.logprob for one in event.prompt_logprobs or []]

        return asyncio.run(scenario())

    expected = torch.tensor(logprobs(1))
    assert len(expected) == len(PROMPTS[1]) - 1
    torch.testing.assert_close(torch.tensor(logprobs(2)), expected, atol=0.2, rtol=0)
    with without("one-shot"):
        torch.testing.assert_close(torch.tensor(logprobs(2)), expected, atol=0.2, rtol=0)


def test_a_rank_that_is_killed_in_mid_stream_changes_no_byte(tmp_path: Path) -> None:
    """The other waits for it in a kernel, and ends all the same."""

    async def scenario() -> None:
        async with serving(tiny_models.save_directory("llama3", tmp_path / "llama3"), 2) as client:
            expected = await tokens_of(client, requests("undisturbed", 150))
            first = client.engine_pid
            assert first is not None
            [rank] = [one for one in descendants(first) if Path(f"/proc/{one}/comm").read_text() == "weft-rank\n"]
            generated = client.stats().generation_tokens
            streams = asyncio.create_task(tokens_of(client, requests("disturbed", 150)))
            await until(lambda: client.stats().generation_tokens > generated + 100, "tokens")
            os.kill(rank, signal.SIGKILL)
            assert await streams == expected
            assert client.restarts == 1
            for pid in (rank, first):
                await until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "the end of the process")

    asyncio.run(scenario())
