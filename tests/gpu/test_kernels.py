"""Parity of the Triton kernels with their references, over ragged shapes, poisoned caches and poisoned outputs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch

pytest.importorskip("triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or IS_INTERPRETED):
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from tests.gpu.cases import case_processes, cases, run  # noqa: E402


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[str]]]:
    """What went wrong with each of the cases that were selected, in processes that share them."""
    names = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    with case_processes() as pool:
        yield {name: pool.submit(run, name) for name in names}
        pool.shutdown(cancel_futures=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases())
def test_parity(name: str, outcomes: dict[str, Future[str]]) -> None:
    wrong = outcomes[name].result()
    assert not wrong, wrong
