from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server
from weft.checkpoint.model_files import ModelFiles


@pytest.fixture(scope="session")
def locked(smollm2_files: ModelFiles) -> Iterator[Server]:
    """The server of the public clients, which has a key. tests/conftest.py keeps their files in one worker."""
    with Server("--tool-style", "hermes", "--api-key", "sesame") as server:
        yield server


@pytest.fixture(scope="module")
def server(smollm2_files: ModelFiles) -> Iterator[Server]:
    with Server() as server:
        yield server
