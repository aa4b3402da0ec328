"""Prefix digests tell routers what a prefix cache holds: of every PUBLISH_EVERY-th block of a sequence the first bytes
of its key. An edge computes those of a prompt as the scheduler does."""

from __future__ import annotations

from collections import OrderedDict

from weft.scheduler.cursors import KeyChain, root_key
from weft.types import Pooling, Request

PUBLISH_EVERY = 4
"""A router knows the length of a cached prefix to so many blocks."""
DIGEST_SIZE = 8
MAX_PUBLISHED = 4096
"""Digests that an engine publishes at most: 262,144 tokens in blocks of 16."""
MAX_ROUTED_TOKENS = 131_072
"""A router looks at no more tokens of a prompt: their keys take about 20 ms."""


def tokens_per_digest(block_size: int) -> int:
    return PUBLISH_EVERY * block_size


def is_published(block: int) -> bool:
    """Return whether a sequence's block, counted from 0, is one that routers are told of."""
    return block % PUBLISH_EVERY == PUBLISH_EVERY - 1


def prompt_digests(request: Request, block_size: int) -> tuple[bytes, ...]:
    """Return the digests of a prompt that an engine publishes when it has cached the part of it that a request can use:
    all full blocks but one that ends with the last token. An image and a pooled mean use no cached blocks."""
    if request.image is not None or request.pooling is Pooling.MEAN:
        return ()
    tokens = [*request.prompt_token_ids[:MAX_ROUTED_TOKENS], *request.output_token_ids][:MAX_ROUTED_TOKENS]
    chain = KeyChain(root_key(request.cache_salt, request.adapter), block_size, request.embeds)
    full = (len(tokens) - 1) // block_size
    return tuple(chain.of(tokens, i)[:DIGEST_SIZE] for i in range(full) if is_published(i))


class PublishedKeys:
    """The keys that are told to routers, at most `most` of them, and what has changed since they were told last. When
    there are more, those that were computed or found most recently are told."""

    def __init__(self, most: int = MAX_PUBLISHED) -> None:
        self._most = most
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        """The least recently used first."""
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        """Return whether anything has changed."""
        return bool(self._added or self._removed)

    def use(self, key: bytes) -> None:
        """Add a key that was computed or found."""
        if key in self._keys:
            self._keys.move_to_end(key)
            return
        if len(self._keys) >= self._most:
            self.remove(next(iter(self._keys)))
        self._keys[key] = None
        if key in self._removed:
            del self._removed[key]
        else:
            self._added[key] = None

    def found(self, keys: list[bytes]) -> None:
        """Note the keys of a chain that was found, its head as the last one used: others may share that."""
        for key in reversed(keys):
            self.use(key)

    def remove(self, key: bytes) -> None:
        """Remove a key that is not cached any more, if it was told of."""
        if key in self._keys:
            del self._keys[key]
            if key in self._added:
                del self._added[key]
            else:
                self._removed[key] = None

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return the digests of the keys that were added and of those that were removed since the last call."""
        changes = [key[:DIGEST_SIZE] for key in self._added], [key[:DIGEST_SIZE] for key in self._removed]
        self._added, self._removed = {}, {}
        return changes
