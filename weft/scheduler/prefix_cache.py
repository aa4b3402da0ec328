"""The prefix cache finds full blocks by the tokens of that block and of all blocks before it."""

from __future__ import annotations

from collections.abc import Iterable

from weft.plan import Limits
from weft.scheduler.block_pool import Block, BlockPool
from weft.scheduler.cursors import RowCursor
from weft.scheduler.prefix_digests import PublishedKeys, is_published


def find_prefix(pool: BlockPool, keys: Iterable[bytes]) -> list[Block]:
    """Return the longest chain of cached blocks that begins a sequence."""
    found: list[Block] = []
    for key in keys:
        block = pool.by_key.get(key)
        if block is None:
            break
        found.append(block)
    return found


class PrefixCache:
    """The cache of the blocks of earlier requests. Switched off, it keeps nothing and finds nothing."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self._pool = pool
        self._block_size = limits.block_size
        self._is_on = limits.enable_prefix_caching
        self._published: PublishedKeys | None = None

    def publish(self) -> PublishedKeys:
        """Collect from now on what routers are told of the cache."""
        self._published = PublishedKeys()
        self._pool.on_forget = self._published.remove
        return self._published

    def find(self, cursor: RowCursor) -> list[Block]:
        """Return the cached blocks that begin a request. At least its last token is computed, for the logits."""
        if not self._is_on or not cursor.takes_cached:
            return []
        full = (len(cursor.tokens) - 1) // self._block_size
        found = find_prefix(self._pool, (cursor.keys.of(cursor.tokens, i) for i in range(full)))
        if self._published is not None:
            self._published.found([cursor.keys.of(cursor.tokens, i) for i in range(len(found)) if is_published(i)])
        return found

    def remember(self, cursor: RowCursor, start: int, stop: int) -> None:
        """Add the blocks that were filled when the known tokens from `start` to `stop` were computed."""
        if self._is_on:
            for i in range(start // self._block_size, stop // self._block_size):
                key = cursor.keys.of(cursor.tokens, i)
                self._pool.remember(cursor.blocks[i], key)
                if self._published is not None and is_published(i):
                    self._published.use(key)
