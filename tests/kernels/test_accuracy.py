"""The default model with weights as they are in the file reads a text about as well as with floats."""

from __future__ import annotations

import pytest
import torch

from weft.checkpoint.model_files import ModelFiles

pytest.importorskip("numba")

from tests.kernels.accuracy import ROUNDING, measure
from weft.kernels import REFERENCE
from weft.kernels.fp8 import E4M3, fp8_weight, rounded_rows
from weft.kernels.reference import silu_mul


def test_rounding_costs_little(smollm2_files: ModelFiles) -> None:
    found = measure(smollm2_files, 600)
    assert 5 < found.perplexity < 100, "it reads"
    assert 0 < found.divergence < 0.003 and found.same_best > 0.95
    # Of so few tokens it differs by chance, too: the spread of one is the root of twice the divergence.
    assert abs(found.loss) < 0.003 + 2 * (2 * found.divergence / found.num_tokens) ** 0.5


def test_a_cache_of_fp8_costs_little(smollm2_files: ModelFiles) -> None:
    found = measure(smollm2_files, 150, kv_dtype=E4M3)
    assert abs(found.loss) < 0.03
    assert 0 < found.divergence < 0.03 and found.same_best > 0.9


def test_the_inputs_of_fp8_are_rounded() -> None:
    x, norm, floats = torch.randn(3, 64), torch.ones(64), torch.randn(64, 64)
    weight, added = fp8_weight(floats), torch.zeros(3, 64)
    expected = REFERENCE.linear(rounded_rows(x), weight, None)
    of_norm = REFERENCE.linear(rounded_rows(REFERENCE.rms_norm(x, norm, 1e-6)), weight, None)
    assert not torch.equal(expected, REFERENCE.linear(x, weight, None))
    assert torch.equal(ROUNDING.linear(x, weight, None), expected)
    assert torch.equal(ROUNDING.norm_linear(x, norm, 1e-6, weight, None), of_norm)
    assert torch.equal(ROUNDING.norm_gate_up(x, norm, 1e-6, weight), silu_mul(of_norm))
    ROUNDING.linear_add(x, weight, None, added)
    assert torch.equal(added, expected)
    hidden = ROUNDING.norm_gate_up(x, norm, 1e-6, weight)
    expected = x + REFERENCE.linear(rounded_rows(hidden), down := fp8_weight(torch.randn(64, 32)), None)
    ROUNDING.add_mlp(x, norm, 1e-6, weight, down)
    assert torch.equal(x, expected)
    assert torch.equal(ROUNDING.linear(x, floats, None), REFERENCE.linear(x, floats, None))
