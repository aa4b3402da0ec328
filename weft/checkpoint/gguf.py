"""Reads the header of a GGUF file (versions 2 and 3, little endian) as untrusted input.

A file is either read to the last field or refused with a ModelError; what is allocated is proportional to the bytes
that are really there.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from weft.errors import ModelError

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class ByteReader:
    """A reader of a mapped file, of which only the bytes up to `end` may be read."""

    def __init__(self, data: mmap.mmap, end: int, path: Path) -> None:
        self.data = data
        self.end = end
        self.path = path
        self.position = 0

    def fail(self, problem: str, *, hint: str = "") -> NoReturn:
        raise ModelError(f"{self.path}: {problem}", hint=hint)

    def take(self, size: int, what: str) -> int:
        """Step over `size` bytes and return where they begin."""
        start = self.position
        if size > self.end - start:
            self.fail(f"{what} needs {size} bytes at offset {start}, where {self.end - start} are left to read.")
        self.position = start + size
        return start

    def check_count(self, count: int, least_bytes: int, what: str) -> None:
        """Refuse a count whose items cannot all be in the bytes that are left."""
        left = self.end - self.position
        if count * least_bytes > left:
            self.fail(f"{count} {what} cannot be in the {left} bytes that are left to read.")

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.data, self.take(8, what))[0]
        return value

    def string(self, what: str) -> str:
        size = self.u64(f"the length of {what}")
        start = self.take(size, what)
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} at offset {start} is not UTF-8 text.")

    def strings(self, count: int, what: str) -> list[str]:
        """Read an array of strings in one tight loop: vocabularies have 10^5 of them."""
        self.check_count(count, 8, f"strings of {what}")
        data, end, position = self.data, self.end, self.position
        length_at = _U64.unpack_from
        pieces: list[bytes] = []
        for _ in range(count):
            start = position + 8
            if start > end:
                self.fail(f"{what} ends after {len(pieces)} of {count} strings.")
            position = start + length_at(data, position)[0]
            if position > end:
                self.fail(
                    f"string {len(pieces)} of {what} needs {position - start} bytes at offset {start}, "
                    f"where {end - start} are left to read."
                )
            pieces.append(data[start:position])
        self.position = position
        try:
            return [piece.decode() for piece in pieces]
        except UnicodeDecodeError:
            self.fail(f"{what} holds a string that is not UTF-8 text.")

    def numbers(self, dtype: np.dtype[np.generic], count: int, what: str) -> list[int] | list[float]:
        self.check_count(count, dtype.itemsize, f"numbers of {what}")
        start = self.take(count * dtype.itemsize, what)
        values: list[int] | list[float] = np.frombuffer(self.data[start : self.position], dtype).tolist()
        return values


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


Value: TypeAlias = str | int | float | bool | list[str] | list[int] | list[float] | list[bool]

MAX_HEADER_BYTES = 64 << 20
"""The largest vocabularies in use take a quarter of this; a longer header is an attack on memory."""
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS: dict[int, np.dtype[np.generic]] = {
    code: np.dtype(name)
    for code, name in {
        0: "u1",
        1: "i1",
        2: "<u2",
        3: "<i2",
        4: "<u4",
        5: "<i4",
        6: "<f4",
        _BOOL: "u1",
        10: "<u8",
        11: "<i8",
        12: "<f8",
    }.items()
}


class GgufTensor(Struct, frozen=True):
    name: str
    type: TensorType
    shape: tuple[int, ...]
    """The shape, row-major with the last dimension contiguous: the reverse of the order in the file."""
    offset: int
    """The offset from the beginning of the file."""
    nbytes: int


class GgufFile(Struct, frozen=True):
    path: Path
    version: int
    alignment: int
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata and the table of tensors, but not the weights themselves."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise ModelError(f"{path}: {size} bytes are too few for a GGUF file.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _header(ByteReader(data, min(size, MAX_HEADER_BYTES), path), size)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}.") from error


def map_tensors(file: GgufFile) -> dict[str, npt.NDArray[np.uint8]]:
    """Map the bytes of every tensor without copying. Writing to them does not change the file."""
    try:
        data = np.memmap(file.path, dtype=np.uint8, mode="c")
    except (OSError, ValueError) as error:
        raise ModelError(f"{file.path}: cannot be mapped: {error}.") from error
    tensors = file.tensors.values()
    if data.size < max((tensor.offset + tensor.nbytes for tensor in tensors), default=0):
        raise ModelError(f"{file.path}: the file was cut to {data.size} bytes after its header was read.")
    flat = data.view(np.ndarray)
    return {tensor.name: flat[tensor.offset : tensor.offset + tensor.nbytes] for tensor in tensors}


def _header(reader: ByteReader, file_size: int) -> GgufFile:
    magic = reader.data[reader.take(4, "the magic") : 4]
    if magic != b"GGUF":
        reader.fail(f"not a GGUF file: it begins with {magic!r}, not b'GGUF'.")
    version = reader.u32("the version")
    if version and not version & 0xFFFF:
        reader.fail("the file is big endian; Weft reads little-endian GGUF.")
    if version not in (2, 3):
        reader.fail(f"GGUF version {version} is not supported; supported: 2, 3.")
    num_tensors, num_pairs = reader.u64("the number of tensors"), reader.u64("the number of metadata keys")
    reader.check_count(num_pairs, 13, "metadata keys")
    reader.check_count(num_tensors, 32, "tensors")
    metadata = _metadata(reader, num_pairs)
    alignment = _alignment(reader, metadata)
    parts = metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        reader.fail(f"one of the {parts} parts of a split model.", hint="Join the parts into one GGUF file.")
    tensors = _tensors(reader, num_tensors, alignment, file_size)
    return GgufFile(reader.path, version, alignment, metadata, tensors)


def _metadata(reader: ByteReader, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(count):
        key = reader.string(f"metadata key {index}")
        if not key:
            reader.fail(f"metadata key {index} is empty.")
        what = f"metadata {_quote(key)}"
        if key in metadata:
            reader.fail(f"{what} is in the file twice.")
        code = reader.u32(f"the type of {what}")
        metadata[key] = _array(reader, what) if code == _ARRAY else _scalar(reader, code, what)
    return metadata


def _scalar(reader: ByteReader, code: int, what: str) -> str | int | float | bool:
    if code == _STRING:
        return reader.string(what)
    value = reader.numbers(_number_type(reader, code, what), 1, what)
    return _booleans(reader, value, what)[0] if code == _BOOL else value[0]


def _array(reader: ByteReader, what: str) -> Value:
    code = reader.u32(f"the item type of {what}")
    count = reader.u64(f"the length of {what}")
    if code == _ARRAY:
        reader.fail(f"{what} is an array of arrays, which Weft does not read.")
    if code == _STRING:
        return reader.strings(count, what)
    values = reader.numbers(_number_type(reader, code, what), count, what)
    return _booleans(reader, values, what) if code == _BOOL else values


def _number_type(reader: ByteReader, code: int, what: str) -> np.dtype[np.generic]:
    dtype = _NUMBERS.get(code)
    if dtype is None:
        reader.fail(f"{what} has the unknown value type {code}; types run from 0 to 12.")
    return dtype


def _booleans(reader: ByteReader, values: list[int] | list[float], what: str) -> list[bool]:
    if any(value > 1 for value in values):
        reader.fail(f"{what} is a boolean with a value other than 0 and 1.")
    return [value == 1 for value in values]


def _alignment(reader: ByteReader, metadata: dict[str, Value]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        reader.fail(f"general.alignment is {_quote(alignment)}; it must be a power of two, 8 or more.")
    return alignment


def _tensors(reader: ByteReader, count: int, alignment: int, file_size: int) -> dict[str, GgufTensor]:
    reader.check_count(count, 32, "tensors")
    tensors: dict[str, GgufTensor] = {}
    for index in range(count):
        tensor = _tensor(reader, index, alignment)
        if tensor.name in tensors:
            reader.fail(f"tensor {_quote(tensor.name)} is in the file twice.")
        tensors[tensor.name] = tensor
    data_start = -(-reader.position // alignment) * alignment
    placed = {
        name: GgufTensor(name, tensor.type, tensor.shape, data_start + tensor.offset, tensor.nbytes)
        for name, tensor in tensors.items()
    }
    free_from = data_start
    for tensor in sorted(placed.values(), key=lambda tensor: tensor.offset):
        stop = tensor.offset + tensor.nbytes
        if stop > file_size:
            reader.fail(
                f"tensor {_quote(tensor.name)} ends at byte {stop}, and the file at {file_size}.",
                hint="The file is cut short; fetch it again.",
            )
        if tensor.offset < free_from:
            reader.fail(f"tensor {_quote(tensor.name)} overlaps the bytes of another.")
        free_from = stop
    return placed


def _tensor(reader: ByteReader, index: int, alignment: int) -> GgufTensor:
    """Read one entry of the table, its offset still counted from the beginning of the weights."""
    name = reader.string(f"the name of tensor {index}")
    if not name:
        reader.fail(f"tensor {index} has no name.")
    what = f"tensor {_quote(name)}"
    num_dimensions = reader.u32(f"the dimensions of {what}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        reader.fail(f"{what} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible.")
    shape = tuple(reversed([reader.u64(f"the shape of {what}") for _ in range(num_dimensions)]))
    code = reader.u32(f"the type of {what}")
    offset = reader.u64(f"the offset of {what}")
    tensor_type = SUPPORTED.get(code)
    if tensor_type is None:
        known = UNSUPPORTED.get(code, f"number {code}")
        reader.fail(f"{what}: type {known} is not supported; supported: {SUPPORTED_NAMES}.")
    num_weights = math.prod(shape)
    if not 0 < num_weights < 1 << 63:
        reader.fail(f"{what} has the impossible shape {shape}.")
    if shape[-1] % tensor_type.block_size:
        reader.fail(f"{what} has rows of {shape[-1]}, no multiple of {tensor_type.name}'s {tensor_type.block_size}.")
    if offset % alignment:
        reader.fail(f"{what} is at offset {offset}, no multiple of the alignment {alignment}.")
    nbytes = num_weights // tensor_type.block_size * tensor_type.block_bytes
    return GgufTensor(name, tensor_type, shape, offset, nbytes)


def _quote(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
