"""Each op of the CPU's table, and each native kernel by itself, against torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.steps import config, random_cache, random_step
from weft.compile_cache import VARIABLE
from weft.kernels import REFERENCE, HeadNorms, ops_for, reference
from weft.kernels.cpu.ops import argmax_rows

OPS = ops_for("cpu")


@pytest.mark.parametrize("rows", [0, 1, 2, 31, 64, 65])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_linear(rows: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 37, dtype=dtype), torch.randn(53, 37, dtype=dtype)
    b = torch.randn(53, dtype=dtype) if bias else None
    y = OPS.linear(x, weight, b)
    assert y.is_contiguous()
    torch.testing.assert_close(
        y, reference.linear(x, weight, b), atol=1e-4 if dtype == torch.float32 else 0.2, rtol=0.02
    )


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_linear_layers_with_their_neighbours(rows: int) -> None:
    x, norm, weight, bias = torch.randn(rows, 36), torch.randn(36), torch.randn(54, 36), torch.randn(54)
    for name, arguments in (("norm_linear", (x, norm, 1e-6, weight, bias)), ("norm_gate_up", (x, norm, 1e-6, weight))):
        ours, theirs = (getattr(ops, name)(*arguments) for ops in (OPS, REFERENCE))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    totals = torch.ones(2, rows, 54)
    for ops, total in zip((OPS, REFERENCE), totals, strict=True):
        ops.linear_add(x, weight, bias, total)
    torch.testing.assert_close(*totals, atol=1e-4, rtol=1e-4)
    down, residuals = torch.randn(36, 27), x.repeat(2, 1, 1)
    for ops, residual in zip((OPS, REFERENCE), residuals, strict=True):
        ops.add_mlp(residual, norm, 1e-6, weight, down)
    torch.testing.assert_close(*residuals, atol=1e-3, rtol=1e-4)
    expected = x + REFERENCE.norm_gate_up(x, norm, 1e-6, weight) @ down.T
    torch.testing.assert_close(residuals[0], expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [{}, {"num_heads": 3, "num_kv_heads": 3, "head_dim": 34}])
def test_rotate_and_store(shape: dict[str, int], dtype: torch.dtype, with_norms: bool) -> None:
    c = config(**shape)
    cache = random_cache(c, 16, 16)[0].to(dtype)
    step = random_step(c, [1, 1, 20], [31, 32, 40], random_cache(c, 16, 16))
    qkv = torch.randn(22, c.heads.q_size + c.heads.kv_size, dtype=dtype)
    rotations = torch.polar(torch.ones(22, c.head_dim // 2), torch.randn(22, c.head_dim // 2))
    wanted_qkv, wanted_cache = qkv.clone(), cache.clone()
    norms = HeadNorms(*torch.randn(2, c.head_dim, dtype=dtype), 1e-6) if with_norms else None
    REFERENCE.rotate_and_store(wanted_qkv, c.heads, rotations, wanted_cache, step.batch.slots, norms)
    OPS.rotate_and_store(qkv, c.heads, rotations, cache, step.batch.slots, norms)
    torch.testing.assert_close(qkv, wanted_qkv)
    torch.testing.assert_close(cache, wanted_cache)


def test_other_devices_have_the_reference() -> None:
    assert ops_for("meta") is REFERENCE


def test_argmax_rows() -> None:
    logits = torch.randn(9, 1003)
    assert torch.equal(argmax_rows(logits), logits.argmax(-1))
    logits[0, [70, 900]] = float("nan")
    logits[1] = float("-inf")
    logits[2, [300, 301, 999]] = 50
    logits[3, 1002] = float("inf")
    logits[4] = float("nan")
    assert argmax_rows(logits)[:5].tolist() == [70, 0, 300, 1002, 0]
    assert argmax_rows(logits[:, ::2]).shape == (9,)
    assert argmax_rows(logits[:0]).shape == (0,)


def test_exp() -> None:
    numba = pytest.importorskip("numba")
    from weft.kernels.cpu.row_ops import exp

    x = torch.cat([torch.linspace(-87, 88, 20001), torch.linspace(-1, 1, 2001)])
    native = numba.vectorize(["float32(float32)"])(exp.py_func)  # type: ignore[attr-defined]
    got = torch.from_numpy(native(x.numpy())).double()
    wanted = x.double().exp()
    assert ((got - wanted).abs() / wanted).max() < 4e-7
    with np.errstate(invalid="ignore"):
        edges = native(np.array([-np.inf, -1e4, np.nan], np.float32))
    assert 0 <= edges[0] < 1e-37 and 0 <= edges[1] < 1e-37 and edges[2] != edges[2]


def test_a_numba_that_cannot_be_used_costs_speed_and_nothing_else(tiny_model: Path, tmp_path: Path) -> None:
    """It may be missing, or refuse the NumPy that is there: both are an ImportError."""
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.4 or less.')")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "weft", "generate", "--raw", "--model", str(tiny_model), "--max-tokens", "4", "a"]
    environment = {**os.environ, "PYTHONPATH": paths, VARIABLE: str(tmp_path / "compiled")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip()
    assert done.stderr.count("cannot be compiled (ImportError: Numba needs NumPy 2.4 or less.)") == 1


def test_every_kernel_is_compiled_and_by_processes_without_torch() -> None:
    pytest.importorskip("numba")
    script = (
        "import sys; from weft.kernels.cpu import compiled, exports, jit\n"
        "assert {*compiled.KERNELS, 'weft_part'} == set(jit.EXPORTS) and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_engine_needs_no_numba_once_kernels_are_compiled() -> None:
    assert argmax_rows(torch.zeros(1, 3)).tolist() == [0]
    script = (
        "import sys, torch; from weft.kernels.cpu.ops import argmax_rows\n"
        "assert argmax_rows(torch.tensor([[1.0, 3.0, 2.0]])).tolist() == [1] and 'numba' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
