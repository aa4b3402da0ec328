"""Models that many rooms' tests share. Nothing here imports torch before a test asks for it."""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weft import logs
from weft.checkpoint.model_files import ModelFiles
from weft.checkpoint.tokenizer_assets import text_assets
from weft.engine.fork_server import shared_fork_server
from weft.engine.process import engine_environment
from weft.errors import ModelError
from weft.hub.resolve import resolve
from weft.types import TextAssets

if TYPE_CHECKING:
    from tests.e2e.tiny_server import TinyServer

# torch counts the cores of the machine, not those this process may use; read by it, and by engine processes, at start.
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_NUM_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
if _NUM_WORKERS > 1 or "OMP_NUM_THREADS" not in os.environ:
    # Also where it is set: a worker inherits it from the process that runs the workers.
    os.environ["OMP_NUM_THREADS"] = str(max(1, min(4, _CORES // _NUM_WORKERS)))


def pytest_configure(config: pytest.Config) -> None:
    """A worker's fork server imports torch beside the collection, with the environment of no test."""
    # What is imported and collected stays: looking for garbage in it again and again would take seconds.
    gc.disable()
    # A shell that starts the suite in the background has it ignored, and what the tests start would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.pluginmanager.hasplugin("hypothesispytest"):
        _take_time_for_examples()
    if sys.platform == "linux" and hasattr(config, "workerinput"):
        shared_fork_server(engine_environment())


def _take_time_for_examples() -> None:
    """No example fails because the machine is busy: by default each has 200 ms, and its making a bound of its own."""
    from hypothesis import HealthCheck, settings

    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")


@pytest.fixture(autouse=True, scope="session")
def certificates_are_read_once() -> Iterator[None]:
    """Every client of httpx would read those of all the world anew, for 50 ms, and most of them for plain HTTP."""
    from httpx._transports import default

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", functools.cache(default.create_ssl_context))
        yield


@pytest.fixture(autouse=True, scope="module")
def settings_are_left_alone() -> Iterator[None]:
    """Every engine after a test that changes them would be a full start: no fork server has that environment."""
    before = {name: value for name, value in os.environ.items() if name.startswith("WEFT_")}
    yield
    assert {name: value for name, value in os.environ.items() if name.startswith("WEFT_")} == before


SHORT = [
    Path(__file__).parent / room for room in ("api", "text", "serving", "scheduler", "checkpoint", "machine", "hub")
]
"""Rooms whose files take a few seconds at most where they start no engine, the longer first."""


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Files that start engines come first, and short ones last: so the workers end together, and none is idle."""
    with_engines = {item.path for item in items if {"smollm2_files", "tiny_model"} & {*item.fixturenames}}

    @functools.cache
    def turn(file: Path) -> int:
        if file in with_engines:
            return -2
        return next((number for number, room in enumerate(SHORT) if room in file.parents), -1)

    items.sort(key=lambda item: turn(item.path))


_last_reports: dict[str, float] = {}
"""When each worker told of a test for the last time."""


def pytest_runtest_logreport(report: Any) -> None:
    if hasattr(report, "node"):
        _last_reports[report.node.gateway.id] = time.monotonic()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _last_reports:
        idle = {worker: max(_last_reports.values()) - at for worker, at in sorted(_last_reports.items())}
        told = ", ".join(f"{worker} {seconds:.0f} s" for worker, seconds in idle.items())
        terminalreporter.write_line(f"Idle while the others ended: {told}")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


GROUPS = {
    "the default model's server": (
        "tests/e2e/test_openai_client.py",
        "tests/e2e/test_chat_terminal.py",
        "tests/e2e/test_responses_client.py",
        "tests/e2e/test_anthropic_client.py",
        "tests/e2e/test_ollama_client.py",
        "tests/e2e/test_endpoints.py",
        "tests/e2e/test_faults.py",
        "tests/e2e/test_secrets.py",
    ),
    "the long model's server": (
        "tests/backends/openai_server/test_weft.py",
        "tests/bench/test_required.py",
        "tests/bench/test_scripts.py",
        "tests/e2e/test_clients.py",
        "tests/e2e/test_fault_matrix.py",
    ),
    "the small server": (
        "tests/e2e/test_bad_requests.py",
        "tests/e2e/test_fuzz.py",
        "tests/e2e/test_openapi_contract.py",
    ),
    "the browser": tuple(f"tests/page/test_{name}.py" for name in ("live_view", "playground", "screenshots")),
    "diffusers and transformers": (
        *("tests/e2e/test_pipelines.py", "tests/model/test_pipelines.py", "tests/worker/test_pipelines.py"),
        *("tests/model/test_parity.py", "tests/worker/test_default_model.py", "tests/worker/test_prompt_outputs.py"),
        "tests/worker/test_denoise.py",
    ),
    "the checker of pictures": ("tests/training/test_checker.py", "tests/training/test_shipped_model.py"),
}
"""Files that share what takes long to start, to import or to make."""
GROUP_OF = {file: name for name, files in GROUPS.items() for file in files}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests run in one worker, and so do those of a group of files."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return GROUP_OF.get(file, file)

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A test that sets up the log, by itself or with a command, leaves other tests their own."""
    loggers = [logging.getLogger(name) for name in ("weft", *logs.FOREIGN)]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    """The default model. `make test` pulls it before the tests."""
    try:
        return resolve("smollm2", progress=False)
    except ModelError as error:
        pytest.skip(f"the default model is not installed and cannot be pulled: {error}")


@pytest.fixture(scope="session")
def smollm2_assets(smollm2_files: ModelFiles) -> TextAssets:
    return text_assets(smollm2_files)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A Hugging Face directory of one of tests.tiny_models.SPECS, made once. Copy it before changing it."""
    from tests import tiny_models

    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = tiny_models.save_directory(name, tmp_path_factory.mktemp("tiny") / name)
        return made[name]

    return directory


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A GGUF file of one of tests.tiny_models.SPECS in a block format, made once."""
    from tests import tiny_models

    made: dict[tuple[str, str], Path] = {}

    def file(name: str, type_name: str = "F32") -> Path:
        key = (name, type_name)
        if key not in made:
            path = tmp_path_factory.mktemp("tiny") / f"{name}.{type_name}.gguf"
            made[key] = tiny_models.save_gguf(name, path, type_name)
        return made[key]

    return file


@pytest.fixture(scope="session")
def tiny_model(tiny_directory: Callable[[str], Path]) -> Path:
    """The tiny model for tests that need any model at all: a directory with tokenizer and chat template."""
    return tiny_directory("smollm2")


@pytest.fixture(scope="session")
def long_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a long context, for answers that do not end before a test has left them."""
    folder = tmp_path_factory.mktemp("models") / "long"
    shutil.copytree(tiny_model, folder)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"max_position_embeddings": 1 << 14}))
    return folder


@pytest.fixture(scope="session")
def long_server(long_model: Path) -> Iterator[TinyServer]:
    """A real server of the long model, for tests that only ask. None of them may kill it or change its settings."""
    from tests.e2e.tiny_server import TinyServer

    with TinyServer(long_model, "--image-model", "none", "--tool-style", "hermes") as server:
        yield server
        server.check_unharmed()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny models: torch's threads would wait for each other longer than they work."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
