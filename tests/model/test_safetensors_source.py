"""Several threads read a file in chunks: every byte arrives at its place, whatever the size."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weft.model.safetensors_source import CHUNK_BYTES, StagedFiles, StagedReader


@pytest.mark.parametrize("num_elements", [1, 7, CHUNK_BYTES // 2, CHUNK_BYTES // 2 + 1, 20 * CHUNK_BYTES + 3])
def test_every_byte_arrives_at_its_place(tmp_path: Path, num_elements: int) -> None:
    stored = torch.arange(num_elements, dtype=torch.int32).to(torch.int16)
    path = tmp_path / "weights"
    path.write_bytes(b"head" + bytes(stored.numpy().data) + b"tail")
    out = torch.zeros(num_elements + 2, dtype=torch.bfloat16)
    reader = StagedReader(torch.device("cpu"))
    with path.open("rb") as file:
        for _ in range(2):
            reader.read_into(out[1:-1], file.fileno(), 4)
    reader.close()
    assert torch.equal(out[1:-1].view(torch.int16), stored)
    assert not out[0]
    assert not out[-1]


def test_a_file_that_is_too_short_is_an_error_and_the_next_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"\1" * (3 * CHUNK_BYTES))
    reader = StagedReader(torch.device("cpu"))
    with path.open("rb") as file:
        for _ in range(50):
            with pytest.raises(EOFError, match="cut short"):
                reader.read_into(torch.zeros(2 * CHUNK_BYTES, dtype=torch.uint8), file.fileno(), 2 * CHUNK_BYTES)
        out = torch.zeros(3 * CHUNK_BYTES, dtype=torch.uint8)
        reader.read_into(out, file.fileno(), 0)
    reader.close()
    assert out.all()


def test_tensors_are_found_by_their_names_in_all_files(tmp_path: Path) -> None:
    tensors = {f"t{rows}": torch.randn(rows, 100).to(torch.bfloat16) for rows in (1, 7, 300, 4000)}
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    save_file({name: tensors[name] for name in ("t300", "t1")}, paths[0], metadata={"format": "pt"})
    save_file({name: tensors[name] for name in ("t7", "t4000")}, paths[1])
    with ExitStack() as stack:
        files = StagedFiles(paths, torch.device("cpu"), stack)
        read = {name: torch.empty_like(one) for name, one in tensors.items()}
        for name, out in read.items():
            files.read_into(out, name)
    assert all(torch.equal(read[name], one) for name, one in tensors.items())
