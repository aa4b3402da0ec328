from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.replicas import PATIENT, key_file
from tests.cluster.streams import Following
from tests.e2e.tiny_server import TinyServer


@pytest.fixture(scope="session")
def cluster_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return key_file(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="session")
def direct(long_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    """A server with an engine of its own."""
    with TinyServer(long_model, "--threads", "1", *PATIENT) as server:
        assert isinstance(server, TinyServer)
        yield server


@pytest.fixture(scope="session")
def expected(direct: TinyServer) -> tuple[str, list[str], str]:
    """The answer of a single server to the chat of these tests."""
    return Following(direct.url).answer()
