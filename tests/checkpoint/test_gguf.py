"""The GGUF reader reads valid files, refuses others with the reason, and allocates nothing for false sizes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import gguf as reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.gguf_bytes import (
    ARRAY,
    BOOL,
    STRING,
    U8,
    U32,
    array,
    gguf,
    pair,
    small_model,
    string,
    tensor,
    u32,
    u64,
    write,
)
from tests.effort import EFFORT
from weft.checkpoint import gguf as ggml
from weft.checkpoint.gguf import map_tensors, read_gguf
from weft.errors import ModelError

HUGE = 2**63
ZEROS = bytes(256)


def test_a_small_file_is_read(tmp_path: Path) -> None:
    file = read_gguf(write(tmp_path, small_model()))
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.rope.freq_base"] == 0.5
    assert file.metadata["test.numbers"] == [-1, 2]
    assert file.metadata[f"test.{BOOL}"] is True
    assert file.metadata["tokenizer.ggml.tokens"] == ["<|end|>", "a", "ß", "<|im_end|>"]
    weight = file.tensors["weight"]
    assert (weight.shape, weight.type.name, weight.nbytes) == ((2, 64), "Q8_0", 136)
    data = map_tensors(file)
    assert data["norm"].tobytes() == bytes(range(32))
    assert data["weight"].tobytes() == b"\1" * 136


def test_version_2_is_read(tmp_path: Path) -> None:
    assert read_gguf(write(tmp_path, gguf(version=2))).version == 2


def test_agrees_with_the_reference_writer(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = reference.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([0.5, -1.0])
    matrix = np.arange(96, dtype=np.float32).reshape(3, 32)
    writer.add_tensor("matrix", matrix)
    packed = reference.quants.quantize(matrix, reference.GGMLQuantizationType.Q4_1)
    writer.add_tensor("packed", packed, raw_dtype=reference.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(path)
    assert file.alignment == 64
    assert file.metadata["tokenizer.ggml.scores"] == [0.5, -1.0]
    assert file.tensors["packed"].shape == (3, 32)
    data = map_tensors(file)
    assert np.array_equal(data["matrix"].view(np.float32).reshape(3, 32), matrix)
    assert data["packed"].tobytes() == packed.tobytes()


def test_the_table_of_types_is_that_of_the_format() -> None:
    for number, tensor_type in ggml.SUPPORTED.items():
        known = reference.GGMLQuantizationType(number)
        assert tensor_type.name == known.name
        assert (tensor_type.block_size, tensor_type.block_bytes) == reference.GGML_QUANT_SIZES[known]
    for number, name in ggml.UNSUPPORTED.items():
        assert reference.GGMLQuantizationType(number).name == name


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes are too few"),
    "magic": (gguf(magic=b"GGML"), "it begins with b'GGML'"),
    "version 1": (gguf(version=1), "version 1 is not supported; supported: 2, 3"),
    "version 4": (gguf(version=4), "version 4 is not supported"),
    "big endian": (gguf(version=3 << 24), "big endian"),
    "many keys": (gguf(num_pairs=HUGE), "metadata keys cannot be in the 8 bytes"),
    "many tensors": (gguf(num_tensors=HUGE), "tensors cannot be in the 8 bytes"),
    "one key too few": (gguf([pair("a", U8, 1)], num_pairs=2, data=ZEROS[:8]), "metadata key 1 is empty"),
    "no tensor name": (gguf((), [tensor("", [8])], ZEROS), "tensor 0 has no name"),
    "long key": (gguf([u64(HUGE) + b"key" + u32(U8) + ZEROS[:8]]), "metadata key 0 needs"),
    "long string": (gguf([string("a") + u32(STRING) + u64(10**6) + b"text"]), "metadata 'a' needs 1000000 bytes"),
    "key not text": (gguf([string(b"\xff\xfe") + u32(U8) + b"\1"]), "metadata key 0 at offset 32 is not UTF-8"),
    "value not text": (gguf([string("a") + u32(STRING) + string(b"\xff")]), "metadata 'a' at offset 45 is not UTF-8"),
    "item not text": (gguf([string("a") + u32(ARRAY) + u32(STRING) + u64(1) + string(b"\xff")]), "holds a string"),
    "value type": (gguf([string("a") + u32(13) + ZEROS[:8]]), "unknown value type 13"),
    "item type": (gguf([string("a") + u32(ARRAY) + u32(99) + u64(1) + ZEROS[:8]]), "unknown value type 99"),
    "boolean": (gguf([pair("a", BOOL, 2)]), "value other than 0 and 1"),
    "array of arrays": (gguf([string("a") + u32(ARRAY) + u32(ARRAY) + u64(1) + ZEROS]), "array of arrays"),
    "long array": (gguf([array("a", U32, [1], count=2**40)]), "numbers of metadata 'a' cannot be in"),
    "longest array": (gguf([array("a", U32, [1], count=2**64 - 1)]), "cannot be in"),
    "long array of strings": (gguf([array("a", STRING, ["x"], count=2**60)]), "strings of metadata 'a' cannot be in"),
    "long item": (
        gguf([string("a") + u32(ARRAY) + u32(STRING) + u64(1) + u64(HUGE)]),
        "string 0 of metadata 'a' needs",
    ),
    "key twice": (gguf([pair("a", U8, 1)] * 2), "'a' is in the file twice"),
    "alignment 0": (gguf([pair("general.alignment", U32, 0)]), "general.alignment is 0"),
    "alignment 24": (gguf([pair("general.alignment", U32, 24)]), "power of two"),
    "alignment text": (gguf([pair("general.alignment", STRING, "32")]), "power of two"),
    "split": (gguf([pair("split.count", U32, 3)]), "one of the 3 parts"),
    "no dimensions": (gguf((), [tensor("t", [])], ZEROS), "has 0 dimensions"),
    "many dimensions": (gguf((), [tensor("t", [1] * 5)], ZEROS), "has 5 dimensions; 1 to 4"),
    "dimension 0": (gguf((), [tensor("t", [4, 0])], ZEROS), r"impossible shape \(0, 4\)"),
    "overflow": (gguf((), [tensor("t", [2**33, 2**33])], ZEROS), "impossible shape"),
    "large tensor": (gguf((), [tensor("t", [2**40])], ZEROS), "ends at byte 4398046511168, and the file at 320"),
    "far offset": (gguf((), [tensor("t", [8], 0, 2**62)], ZEROS), "and the file at 320"),
    "odd offset": (gguf((), [tensor("t", [8], 0, 4)], ZEROS), "no multiple of the alignment 32"),
    "overlap": (gguf((), [tensor("a", [16], 0, 0), tensor("b", [8], 0, 32)], ZEROS), "'b' overlaps"),
    "tensor twice": (gguf((), [tensor("a", [8]), tensor("a", [8], 0, 32)], ZEROS), "'a' is in the file twice"),
    "ragged row": (gguf((), [tensor("t", [33], 8)], ZEROS), "rows of 33, no multiple of Q8_0's 32"),
    "unsupported type": (gguf((), [tensor("t", [256], 10)], ZEROS), "type Q2_K is not supported; supported: F32, F16"),
    "unknown type": (gguf((), [tensor("t", [8], 77)], ZEROS), "type number 77 is not supported"),
    "lying dimensions": (gguf((), [tensor("t", [8], dimensions=4)], b""), "bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_lie_is_refused_by_name_and_costs_no_memory(case: str, tmp_path: Path) -> None:
    content, expected = HOSTILE[case]
    path = write(tmp_path, content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=expected) as raised:
            read_gguf(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(path) in raised.value.message
    assert len(raised.value.message) < len(str(path)) + 250
    assert peak_bytes < 1 << 20


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = small_model()
    for size in range(len(whole)):
        with pytest.raises(ModelError):
            read_gguf(write(tmp_path, whole[:size]))


def test_a_file_cut_after_it_was_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, small_model())
    file = read_gguf(path)
    path.write_bytes(small_model()[:-1])
    with pytest.raises(ModelError, match="was cut to"):
        map_tensors(file)


def test_what_is_not_there_is_an_error_of_the_model(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelError, match="cannot be read"):
            read_gguf(path)


_SIZE = len(small_model())
_EDITS = st.lists(
    st.tuples(st.integers(0, _SIZE - 1), st.binary(min_size=1, max_size=9)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150 * EFFORT)
@given(edits=_EDITS, cut=st.integers(0, _SIZE) | st.just(_SIZE))
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    edits: list[tuple[int, bytes]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(small_model())
    for position, replacement in edits:
        content[position : position + len(replacement)] = replacement
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content[:cut])
    try:
        file = read_gguf(path)
    except ModelError:
        return
    assert all(array.size == file.tensors[name].nbytes for name, array in map_tensors(file).items())


@settings(max_examples=50 * EFFORT)
@given(tail=st.binary(max_size=200))
def test_noise_after_the_magic_is_refused_or_read(tail: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.gguf"
    path.write_bytes(b"GGUF" + u32(3) + tail)
    try:
        read_gguf(path)
    except ModelError:
        return
