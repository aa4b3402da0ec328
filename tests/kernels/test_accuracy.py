"""The default model with weights as they are in the file reads a text about as well as with floats."""

from __future__ import annotations

import pytest

from weft.checkpoint.model_files import ModelFiles

pytest.importorskip("numba")

from tests.kernels.accuracy import measure
from weft.kernels.fp8 import E4M3


def test_rounding_costs_little(smollm2_files: ModelFiles) -> None:
    found = measure(smollm2_files, 150)
    assert 5 < found.perplexity < 100, "it reads"
    assert abs(found.loss) < 0.003
    assert 0 < found.divergence < 0.003 and found.same_best > 0.95


def test_a_cache_of_fp8_costs_little(smollm2_files: ModelFiles) -> None:
    found = measure(smollm2_files, 150, kv_dtype=E4M3)
    assert abs(found.loss) < 0.03
    assert 0 < found.divergence < 0.03 and found.same_best > 0.9
