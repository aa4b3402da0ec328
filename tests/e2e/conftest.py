from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.e2e.tiny_server import TinyServer
from weft.checkpoint.model_files import ModelFiles

SECRETS = {
    "WEFT_API_KEY": "sesame",
    "WEFT_ADMIN_KEY": "boss",
    **dict.fromkeys(("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "NVIDIA_API_KEY", "DATABASE_URL"), "sesame-of-another"),
}


@pytest.fixture(scope="session")
def locked(smollm2_files: ModelFiles) -> Iterator[Server]:
    """The server of the public clients, which has keys from its environment. tests/conftest.py keeps their files in one
    worker. A test may kill its engine, if it waits for the next one."""
    flags = ("--tool-style", "hermes", "--compat-api", "ollama,llamacpp", "--heartbeat-timeout-s", "120")
    with Server(*flags, env=SECRETS) as server:
        server.key = "sesame"
        yield server


@pytest.fixture(scope="session")
def small_server(
    tiny_model: Path, tiny_image_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TinyServer]:
    """A server of the tiny model with a short context, for requests that it refuses or soon has answered. It runs under
    `python -O`: no check may be an assert. None of the tests may kill it."""
    flags = ("--max-model-len", "128", "--kv-cache-memory-mb", "16", "--threads", "1", "--max-n", "32")
    images = ("--image-model", str(tiny_image_model), "--allow-prompt-embeds")
    images += ("--data-dir", str(tmp_path_factory.mktemp("data")))
    with TinyServer(tiny_model, *flags, *images, "--tool-style", "hermes", env={"PYTHONOPTIMIZE": "1"}) as server:
        yield server
        server.check_unharmed()


@pytest.fixture(scope="session")
def tiny_image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that draws beside tiny_model."""
    from tests.tiny_images import save_image_model

    return save_image_model(tmp_path_factory.mktemp("images") / "tiny-dit", 96)
