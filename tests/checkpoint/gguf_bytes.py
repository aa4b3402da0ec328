"""Writes a GGUF file byte by byte, so that a test can put a wrong value into any field."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw)) + raw


def scalar(code: int, value: object) -> bytes:
    return string(value) if code == STRING else struct.pack("<" + _FORMATS[code], value)  # type: ignore[arg-type]


def pair(key: str, code: int, value: object) -> bytes:
    return string(key) + u32(code) + scalar(code, value)


def array(key: str, code: int, values: Sequence[object], *, count: int | None = None) -> bytes:
    items = b"".join(scalar(code, value) for value in values)
    return string(key) + u32(ARRAY) + u32(code) + u64(len(values) if count is None else count) + items


def tensor(name: str, shape: Sequence[int], code: int = 0, offset: int = 0, *, dimensions: int | None = None) -> bytes:
    """Describe a tensor; `shape` is in the order of the file, the contiguous dimension first."""
    count = len(shape) if dimensions is None else dimensions
    return string(name) + u32(count) + b"".join(map(u64, shape)) + u32(code) + u64(offset)


def gguf(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_pairs: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    head = magic + u32(version)
    head += u64(len(tensors) if num_tensors is None else num_tensors)
    head += u64(len(pairs) if num_pairs is None else num_pairs)
    head += b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data


def small_model() -> bytes:
    """Return a file with two tensors, a tokenizer, and a value of every type."""
    pairs = [
        pair("general.architecture", STRING, "llama"),
        pair("llama.block_count", U32, 2),
        pair("llama.rope.freq_base", F32, 0.5),
        *(pair(f"test.{code}", code, 1) for code in _FORMATS),
        array("test.numbers", I16, [-1, 2]),
        pair("tokenizer.ggml.model", STRING, "gpt2"),
        pair("tokenizer.ggml.pre", STRING, "smollm"),
        array("tokenizer.ggml.tokens", STRING, ["<|end|>", "a", "ß", "<|im_end|>"]),
        array("tokenizer.ggml.token_type", I32, [3, 1, 1, 3]),
        array("tokenizer.ggml.merges", STRING, ["a b"]),
        pair("tokenizer.ggml.eos_token_id", U32, 0),
        pair("tokenizer.chat_template", STRING, "{{ m }}<|im_end|>"),
    ]
    tensors = [tensor("norm", [8], 0, 0), tensor("weight", [64, 2], 8, 32)]
    return gguf(pairs, tensors, bytes(range(32)) + b"\1" * 136)


def write(folder: Path, content: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path
