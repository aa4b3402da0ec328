"""Every block format is equal, to the bit, to the reference of the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from weft.errors import ModelError
from weft.model import dequant
from weft.model.dequant import FORMATS, dequantise

# Where a block holds half-precision scales: random bytes there could be infinite or not a number.
HALVES = {
    "F16": (0,),
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(type_name: str, num_blocks: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if type_name in ("F32", "BF16"):
        floats = rng.standard_normal(num_blocks).astype(np.float32)
        kept = floats if type_name == "F32" else np.ascontiguousarray(floats.view(np.uint16)[1::2])
        return kept.view(np.uint8).reshape(num_blocks, -1)
    blocks = rng.integers(0, 256, (num_blocks, FORMATS[type_name].block_bytes), dtype=np.uint8)
    for at in HALVES[type_name]:
        scale = rng.standard_normal(num_blocks) * 10.0 ** rng.integers(-8, 4, num_blocks)
        blocks[:, at : at + 2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks


def reference(blocks: np.ndarray, type_name: str) -> np.ndarray:
    return dequantize(blocks.reshape(-1), gguf.GGMLQuantizationType[type_name]).reshape(-1)


@pytest.mark.parametrize("type_name", FORMATS)
def test_equal_to_the_reference_to_the_bit(type_name: str) -> None:
    blocks = random_blocks(type_name, 3000)
    expected = reference(blocks, type_name)
    weights = dequantise(torch.from_numpy(blocks).view(-1), type_name, (30, expected.size // 30))
    assert weights.dtype == torch.float32
    np.testing.assert_array_equal(weights.view(-1).numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("type_name", FORMATS)
def test_block_sizes_are_those_of_the_format(type_name: str) -> None:
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    assert sizes == (FORMATS[type_name].block_size, FORMATS[type_name].block_bytes)


@pytest.mark.parametrize("type_name", FORMATS)
def test_chunks_join_without_a_seam(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks(type_name, 1000)
    raw = torch.from_numpy(blocks).view(-1)
    shape = (1000 * FORMATS[type_name].block_size,)
    whole = dequantise(raw, type_name, shape)
    monkeypatch.setattr(dequant, "CHUNK_WEIGHTS", 7 * 256)
    assert torch.equal(dequantise(raw, type_name, shape), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_out_takes_the_weights_in_its_own_type(dtype: torch.dtype) -> None:
    raw = torch.from_numpy(random_blocks("Q4_1", 64)).view(-1)
    out = torch.empty((32, 64), dtype=dtype)
    assert dequantise(raw, "Q4_1", (32, 64), out=out) is out
    assert torch.equal(out, dequantise(raw, "Q4_1", (32, 64)).to(dtype))


def test_a_slice_of_a_larger_buffer_decodes_in_place() -> None:
    buffer = torch.zeros(8 + 64 * 20, dtype=torch.uint8)
    buffer[8:] = torch.from_numpy(random_blocks("Q4_1", 64)).view(-1)
    assert torch.equal(dequantise(buffer[8:], "Q4_1", (2048,)), dequantise(buffer[8:].clone(), "Q4_1", (2048,)))


def test_what_cannot_be_decoded_is_named() -> None:
    raw = torch.zeros(40, dtype=torch.uint8)
    with pytest.raises(ModelError, match=r"type Q2_K are not supported; supported: F32"):
        dequantise(raw, "Q2_K", (64,))
    with pytest.raises(ModelError, match=r"32 weights take 20 bytes"):
        dequantise(raw, "Q4_1", (32,))
    with pytest.raises(ModelError, match=r"32 weights take 20 bytes"):
        dequantise(raw, "Q4_1", (65,))
    with pytest.raises(ModelError, match=r"out is torch.int64"):
        dequantise(raw, "Q4_1", (64,), out=torch.empty(64, dtype=torch.int64))
