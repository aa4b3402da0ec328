"""The tensor types of GGUF files: which Weft reads, and how many bytes they take."""

from __future__ import annotations

from msgspec import Struct


class TensorType(Struct, frozen=True):
    id: int
    name: str
    block_size: int
    """Weights in a block."""
    block_bytes: int


SUPPORTED: dict[int, TensorType] = {
    tensor_type.id: tensor_type
    for tensor_type in (
        TensorType(0, "F32", 1, 4),
        TensorType(1, "F16", 1, 2),
        TensorType(30, "BF16", 1, 2),
        TensorType(8, "Q8_0", 32, 34),
        TensorType(2, "Q4_0", 32, 18),
        TensorType(3, "Q4_1", 32, 20),
        TensorType(6, "Q5_0", 32, 22),
        TensorType(7, "Q5_1", 32, 24),
        TensorType(12, "Q4_K", 256, 144),
        TensorType(13, "Q5_K", 256, 176),
        TensorType(14, "Q6_K", 256, 210),
    )
}

SUPPORTED_NAMES = ", ".join(tensor_type.name for tensor_type in SUPPORTED.values())

UNSUPPORTED: dict[int, str] = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
