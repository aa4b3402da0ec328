from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server
from weft.checkpoint.model_files import ModelFiles


@pytest.fixture(scope="module")
def server(smollm2_files: ModelFiles) -> Iterator[Server]:
    with Server() as server:
        yield server
