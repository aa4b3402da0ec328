"""The prefix cache: full blocks are found again by what they and all blocks before them hold."""

from __future__ import annotations

from collections.abc import Iterable

from weft.plan import Limits, Row
from weft.scheduler.block_pool import Block, BlockPool
from weft.scheduler.cursors import RowCursor


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
