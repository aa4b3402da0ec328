"""A kernel that writes far behind the memory it was given."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wild_store(pointer, offset):
    tl.store(pointer + offset, 1)
