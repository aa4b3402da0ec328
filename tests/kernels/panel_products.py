"""Products with every format of panels, and halves of floats, against torch, as a program: what it is compiled for is
settled at its start."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.kernels.cpu import attention, panels
from weft.kernels.cpu.compiled import PANEL_KERNELS, SYMBOL, ObjectCode, object_files
from weft.kernels.cpu.jit import export, object_code, types
from weft.kernels.cpu.job import KV_FLOAT16, LANES, SCRATCH_FLOATS
from weft.kernels.cpu.raw_memory import floats, signed_bytes
from weft.kernels.panel_format import BLOCK, FORMATS, INPUT_GROUP, PanelLayout
from weft.kernels.quantised import pack

SHAPES = ((45, 3, 1), (8, 5, 15))
"""Rows, blocks of columns, and inputs: every tile of inputs, and a last panel that is not whole."""


@export(types.void(*[types.int64] * 12))
def product(
    kind: int, weight: int, num_rows: int, num_blocks: int, x: int, num_inputs: int, numbers: int, scales: int,
    sums: int, out: int, unpacked: int, scratch: int,
) -> None:  # fmt: skip
    """Compute the products of a weight with inputs, and the floats of its rows; all by their addresses."""
    size = num_blocks * BLOCK
    panels.quantise(floats(x), num_inputs * size, signed_bytes(numbers), floats(scales), floats(sums))
    panels.panel_linear(
        kind, weight, 0, num_rows, num_blocks, signed_bytes(numbers), floats(scales), floats(sums),
        num_inputs, floats(out), num_rows, floats(scratch),
    )  # fmt: skip
    for row in range(num_rows):
        panels.unpack_row(kind, signed_bytes(weight), row, num_blocks, floats(unpacked + row * size * 4))


@export(types.void(*[types.int64] * 3))
def halves(x: int, count: int, out: int) -> None:
    """Write floats as a cache of halves has them; all by their addresses."""
    attention.pack_head(KV_FLOAT16, floats(x), count, signed_bytes(out))


def check_halves(native_halves: Callable[..., None]) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).float()
    following = torch.nextafter(every, torch.tensor(float("inf")))
    # Between two halves, just beside that, and what is too large or too small for them.
    middle = (every[:-1] + every[1:]) / 2
    random = torch.randint(-(2**31), 2**31 - 1, (200_000,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    x = torch.cat((every, following, middle, torch.nextafter(middle, torch.tensor(0.0)), random))
    out = torch.empty(len(x), dtype=torch.float16)
    native_halves(x.data_ptr(), len(x), out.data_ptr())
    # `torch.testing` imports for a second.
    assert torch.allclose(out, x.half(), atol=0, rtol=0, equal_nan=True)
    assert torch.equal(out.signbit(), x.signbit())


def check(kind: int, native_product: Callable[..., None]) -> None:
    wanted = FORMATS[kind - 1]
    for num_rows, num_blocks, num_inputs in SHAPES:
        size = num_blocks * BLOCK
        numbers = torch.randint(0, 2**wanted.bits, (num_rows, size), dtype=torch.uint8)
        scales = torch.rand(num_rows, size // wanted.group_size).half().float()
        # Halves below the least that is normal, too.
        scales[0] = 2.0**-20
        weight = pack(
            numbers, scales, -(2.0 ** (wanted.bits - 1)) * scales, wanted, PanelLayout(LANES, panels.IS_SIGNED)
        )
        x, out = torch.randn(num_inputs, size), torch.empty(num_inputs, num_rows)
        unpacked, scratch = torch.empty(num_rows, size), torch.empty(SCRATCH_FLOATS)
        whole = torch.empty(num_inputs, size, dtype=torch.int8)
        steps, sums = (torch.empty(num_inputs, size // INPUT_GROUP) for _ in range(2))
        native_product(
            kind, weight.panels.data_ptr(), num_rows, num_blocks, x.data_ptr(), num_inputs, whole.data_ptr(),
            steps.data_ptr(), sums.data_ptr(), out.data_ptr(), unpacked.data_ptr(), scratch.data_ptr(),
        )  # fmt: skip
        assert torch.allclose(unpacked, weight.dequantised(), atol=1e-5, rtol=1.3e-6)
        # One near the border of two whole numbers may be rounded to either.
        inputs = whole.double() * steps.double().repeat_interleave(INPUT_GROUP, dim=1)
        assert (inputs - x).abs().max() <= 0.51 * steps.max()
        expected = inputs @ weight.dequantised().double().T
        assert (out - expected).abs().max() < 2e-6 * expected.abs().max()


if __name__ == "__main__":
    # Weft's own kernels are compiled once on a machine, for each of its processors.
    own = object_files([SYMBOL + name for name in PANEL_KERNELS])
    code = ObjectCode([*map(object_code, [f"{SYMBOL}product", f"{SYMBOL}halves"]), *own.values()])
    for each, _ in enumerate(FORMATS, 1):
        check(each, code.function("product", 12))
    check_halves(code.function("halves", 3))
    print(LANES)
