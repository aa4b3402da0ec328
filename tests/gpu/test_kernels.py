"""Parity of the Triton kernels with their references, over ragged shapes, poisoned caches and poisoned outputs."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or IS_INTERPRETED):
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from tests.gpu.cases import cases  # noqa: E402

CASES = cases()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_parity(name: str) -> None:
    torch.manual_seed(0)
    CASES[name]()
