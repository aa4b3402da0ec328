"""A GPU that faults ends an engine process and nobody's stream; one that runs out of memory ends neither."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests import tiny_models
from tests.gpu.client_requests import end_of, requests
from weft.checkpoint.model_files import ModelFiles
from weft.config import load
from weft.engine.client import EngineClient
from weft.engine.process import LaunchedEngine, launch_engine
from weft.hub.resolve import resolve
from weft.types import FinishReason

pytestmark = pytest.mark.gpu

CONFIG = load(
    {"device": "cuda", "dtype": "float32", "max_model_len": 256, "num_blocks": 256, "max_num_seqs": 12}, env={}
)
NUM_TOKENS = 60


class Served:
    """What an engine gave, and what became of it."""

    def __init__(self, answers: dict[str, list[int]], finishes: set[FinishReason | None], client: EngineClient) -> None:
        self.answers = answers
        self.finishes = finishes
        self.restarts = client.restarts
        self.preemptions = client.stats().preemptions


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return b"\nState:\tZ" not in Path(f"/proc/{pid}/status").read_bytes()


def serve(files: ModelFiles, launch: Callable[[], LaunchedEngine]) -> Served:
    async def scenario() -> Served:
        client = EngineClient(CONFIG, files, launch)
        await client.start()
        try:
            first_pid = client.engine_pid
            assert first_pid is not None
            entries = [client.submit(request) for request in requests("run", NUM_TOKENS)]
            async with asyncio.timeout(200):
                ends = [await end_of(entry) for entry in entries]
            assert (client.engine_pid == first_pid) == (client.restarts == 0) == is_alive(first_pid)
            answers = {entry.id: list(entry.delivered) for entry in entries}
            return Served(answers, {end.finish for end in ends}, client)
        finally:
            await client.close()

    return asyncio.run(scenario())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return resolve(str(tiny_models.save_directory("llama3", tmp_path_factory.mktemp("tiny") / "llama3")))


@pytest.fixture(scope="module")
def undisturbed(files: ModelFiles) -> dict[str, list[int]]:
    served = serve(files, launch_engine)
    assert served.restarts == 0 and served.finishes == {FinishReason.LENGTH}
    assert all(len(tokens) == NUM_TOKENS for tokens in served.answers.values())
    return served.answers


def with_fault(fault: str, marker: Path) -> Callable[[], LaunchedEngine]:
    return partial(launch_engine, "tests.gpu.faulty", fault, str(marker))


@pytest.mark.parametrize(
    ("fault", "said"), [("assert", "device-side assert triggered"), ("access", "an illegal memory access")]
)
def test_a_fault_ends_the_engine_and_every_stream_goes_on(
    fault: str,
    said: str,
    files: ModelFiles,
    undisturbed: dict[str, list[int]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = serve(files, with_fault(fault, tmp_path / "happened"))
    assert (tmp_path / "happened").exists()
    assert served.answers == undisturbed
    assert served.finishes == {FinishReason.LENGTH}
    assert served.restarts == 1
    (death,) = [record.getMessage() for record in caplog.records if "The engine died" in record.getMessage()]
    assert said in death


def test_without_memory_for_a_step_the_engine_lives_and_every_stream_goes_on(
    files: ModelFiles, undisturbed: dict[str, list[int]], tmp_path: Path
) -> None:
    served = serve(files, with_fault("memory", tmp_path / "happened"))
    assert (tmp_path / "happened").exists()
    assert served.answers == undisturbed
    assert served.finishes == {FinishReason.LENGTH}
    assert served.restarts == 0
    assert served.preemptions > 0
