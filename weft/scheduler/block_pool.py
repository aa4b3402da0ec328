"""The block pool of the KV cache: which blocks are in use, which are free, and which free ones are still cached.

The free list is threaded through the blocks themselves, so taking a cached block out of its middle is O(1)
and allocates nothing. Its head is the block that was released longest ago: the first to be reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise


class Block:
    """One block of the KV cache."""

    __slots__ = ("drafted", "id", "key", "next", "prev", "refs")

    def __init__(self, id: int) -> None:
        self.id = id
        self.refs = 0
        self.key: bytes | None = None
        """The key of its content, when it is full and the prefix cache may find it."""
        self.drafted = False
        """True when the draft model's cache has its tokens as well."""
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.id}, refs={self.refs}, key={self.key.hex()[:8] if self.key else None})"


class FreeList:
    """A doubly linked list with one sentinel before its head and after its tail."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._sentinel = Block(-1)
        around = (self._sentinel, *blocks, self._sentinel)
        for before, after in pairwise(around):
            before.next, after.prev = after, before
        self._length = len(blocks)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        block = self._sentinel.next
        while block is not None and block is not self._sentinel:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        last = self._sentinel.prev
        assert last is not None and block.next is None
        last.next, block.prev = block, last
        block.next, self._sentinel.prev = self._sentinel, block
        self._length += 1

    def remove(self, block: Block) -> None:
        before, after = block.prev, block.next
        assert before is not None and after is not None
        before.next, after.prev = after, before
        block.prev = block.next = None
        self._length -= 1

    def popleft(self) -> Block:
        block = self._sentinel.next
        assert block is not None and block is not self._sentinel
        self.remove(block)
        return block


class BlockPool:
    """The pool of all blocks. Block 0 is the null block: padding is written there, and never read."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free = FreeList(self.blocks[1:])
        self.by_key: dict[bytes, Block] = {}
        self.on_forget: Callable[[bytes], None] | None = None
        """Called with each key that the prefix cache does not find any more."""

    @property
    def num_usable(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        return len(self.free)

    def allocate(self, count: int) -> list[Block]:
        """Take free blocks, the least recently used first, and evict them from the prefix cache."""
        if count > len(self.free):
            raise RuntimeError(f"{count} blocks asked, {len(self.free)} free")
        taken = [self.free.popleft() for _ in range(count)]
        for block in taken:
            self._forget(block)
            block.refs = 1
            block.drafted = False
        return taken

    def share(self, block: Block) -> None:
        """Add a reference to a block that the prefix cache found."""
        if block.refs == 0:
            self.free.remove(block)
        block.refs += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """Release a chain of blocks. Its tail is freed first, so that its head is the last to be reused."""
        for block in reversed(blocks):
            if block.refs <= 0:
                raise RuntimeError(f"{block} released more often than it was taken")
            block.refs -= 1
            if block.refs == 0:
                self.free.append(block)

    def remember(self, block: Block, key: bytes) -> None:
        """Add a full block to the prefix cache. A second block of the same content stays out: tables only grow."""
        if block.key is None and key not in self.by_key:
            block.key = key
            self.by_key[key] = block

    def cells(self, first: int, num_cells: int, blocks_per_cell: int) -> tuple[list[int], list[int]]:
        """Count the blocks in use, and the free ones that are cached, in each of these cells of neighbouring blocks."""
        blocks = self.blocks[1 + first : 1 + first + num_cells * blocks_per_cell]
        states = bytes([1 if block.refs else 2 if block.key is not None else 0 for block in blocks])
        cells = [(start, start + blocks_per_cell) for start in range(0, len(states), blocks_per_cell)]
        return [states.count(1, *cell) for cell in cells], [states.count(2, *cell) for cell in cells]

    def forget_all(self) -> None:
        for block in list(self.by_key.values()):
            self._forget(block)

    def _forget(self, block: Block) -> None:
        if block.key is not None:
            if self.by_key.get(block.key) is block:
                del self.by_key[block.key]
                if self.on_forget is not None:
                    self.on_forget(block.key)
            block.key = None
