"""What the tests of real vLLM share: a tiny model, two adapters for it, and the native engine beside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weft.backends.blocking import BlockingEngine
from weft.backends.native import start_native


@pytest.fixture(scope="session")
def vllm_model(tiny_directory: Callable[[str], Path]) -> Path:
    from tests.backends.vllm.real import MODEL

    return tiny_directory(MODEL)


@pytest.fixture(scope="session")
def long_model(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that could hold a long context, if there were memory for it."""
    folder = tmp_path_factory.mktemp("models") / "long"
    shutil.copytree(vllm_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**20}))
    return folder


@pytest.fixture(scope="session")
def adapters(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from tests.backends.vllm.real import save_adapter

    folder = tmp_path_factory.mktemp("adapters")
    return {name: str(save_adapter(folder / name, vllm_model, seed)) for seed, name in enumerate(("red", "blue"))}


@pytest.fixture(scope="session")
def native(vllm_model: Path) -> Iterator[BlockingEngine]:
    from tests.backends.vllm.real import config_of

    config = config_of(vllm_model, device="cpu", threads=1)
    with BlockingEngine(lambda: start_native(config)) as blocking:
        yield blocking
