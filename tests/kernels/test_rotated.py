"""Weights of eight bits whose columns are rotated, and rows for them."""

from __future__ import annotations

import torch

from weft.kernels.rotated import SIDE, rotated, rotated_rows, rotated_weight


def test_a_rotation_is_its_own_inverse_and_leaves_products_as_they_are() -> None:
    x, weight = torch.randn(5, 3 * SIDE, dtype=torch.float64), torch.randn(7, 3 * SIDE, dtype=torch.float64)
    torch.testing.assert_close(rotated(rotated(x)), x)
    torch.testing.assert_close(rotated(x) @ rotated(weight).T, x @ weight.T)


def test_one_large_column_costs_the_others_little() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 1024), torch.randn(256, 1024)
    x[:, 77] *= 20
    held, (numbers, scales) = rotated_weight(weight), rotated_rows(x)
    wanted = x @ weight.T
    error = (numbers * scales) @ (held.numbers * held.scales.T).T - wanted
    plain_scales = x.abs().amax(1, keepdim=True) / 127
    plain_error = torch.round(x / plain_scales) * plain_scales @ weight.T - wanted
    assert error.norm() < 0.4 * plain_error.norm()
    assert error.norm() < 0.02 * wanted.norm()
    assert numbers.dtype == held.numbers.dtype == torch.int8 and numbers.abs().max() == 127
    assert (held.dequantised() - weight).norm() < 0.01 * weight.norm()


def test_a_row_without_numbers_has_a_scale_that_is_none() -> None:
    x = torch.randn(4, SIDE)
    x[1, 3], x[2, 5], x[3] = float("nan"), float("inf"), 0
    scales = rotated_rows(x).scales[:, 0]
    assert scales.isnan().tolist() == [False, True, True, False]
