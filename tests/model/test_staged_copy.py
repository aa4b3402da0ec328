"""Copies by several threads in chunks are those of one copy, whatever the size."""

from __future__ import annotations

import pytest
import torch

from weft.model.staged_copy import CHUNK_BYTES, StagedCopy


@pytest.mark.parametrize("num_elements", [1, 7, CHUNK_BYTES // 2, CHUNK_BYTES // 2 + 1, 20 * CHUNK_BYTES + 3])
def test_every_byte_arrives_at_its_place(num_elements: int) -> None:
    mapped = torch.arange(num_elements, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    out = torch.zeros(num_elements + 2, dtype=torch.bfloat16)
    staged_copy = StagedCopy(torch.device("cpu"))
    staged_copy.copy(out[1:-1], mapped)
    staged_copy.copy(out[1:-1], mapped)
    staged_copy.close()
    assert torch.equal(out[1:-1].view(torch.int16), mapped.view(torch.int16))
    assert not out[0]
    assert not out[-1]


def test_a_chunk_that_cannot_be_copied_is_an_error_and_the_next_copy_works() -> None:
    staged_copy = StagedCopy(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="size"):
        for _ in range(100):
            staged_copy.copy(torch.zeros(3, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8))
    out = torch.zeros(3 * CHUNK_BYTES, dtype=torch.uint8)
    staged_copy.copy(out, torch.ones(3 * CHUNK_BYTES, dtype=torch.uint8))
    staged_copy.close()
    assert out.all()
