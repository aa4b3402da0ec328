"""What cached blocks are found by: a chain of hashes, each of a block's tokens and of all that comes before them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from weft.types import Adapter


def root_key(cache_salt: str, adapter: Adapter | None = None) -> bytes:
    """The parent of a sequence's first block: sequences of different roots share nothing. Of an adapter the number
    counts: another may have its name later."""
    number = 0 if adapter is None else adapter.number
    return hashlib.blake2b(repr((cache_salt, number)).encode(), digest_size=32).digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=32).digest()


class KeyChain:
    """The keys of a sequence's full blocks, each computed once, when its tokens are known."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self._keys = [root]
        self._block_size = block_size

    def of(self, tokens: Sequence[int], block: int) -> bytes:
        """The key of a sequence's block, counted from 0; its tokens and all before them must be known."""
        while len(self._keys) < block + 2:
            start = (len(self._keys) - 1) * self._block_size
            self._keys.append(block_key(self._keys[-1], tokens[start : start + self._block_size]))
        return self._keys[block + 1]
