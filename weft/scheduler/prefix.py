"""The prefix cache: full blocks are found again by what they and all blocks before them hold."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from weft.plan import Limits, Row
from weft.scheduler.blocks import Block, BlockPool
from weft.types import Adapter

if TYPE_CHECKING:
    from weft.scheduler.cursors import RowCursor


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


def find_prefix(pool: BlockPool, keys: Iterable[bytes]) -> list[Block]:
    """The longest chain of cached blocks that begins a sequence."""
    found: list[Block] = []
    for key in keys:
        block = pool.by_key.get(key)
        if block is None:
            break
        found.append(block)
    return found


class PrefixCache:
    """What requests leave for those that begin alike. Switched off, it keeps nothing and finds nothing."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self._pool = pool
        self._block_size = limits.block_size
        self._is_on = limits.enable_prefix_caching

    def find(self, cursor: RowCursor) -> list[Block]:
        """Cached blocks that begin a request. At least its last token is computed: its logits are needed."""
        if not self._is_on or not cursor.takes_cached:
            return []
        full = (len(cursor.tokens) - 1) // self._block_size
        return find_prefix(self._pool, (cursor.keys.of(cursor.tokens, i) for i in range(full)))

    def remember(self, cursor: RowCursor, row: Row) -> None:
        """Make the blocks that a row filled findable."""
        if self._is_on:
            for i in range(row.start // self._block_size, (row.start + row.count) // self._block_size):
                self._pool.remember(cursor.blocks[i], cursor.keys.of(cursor.tokens, i))
