"""A port that a server can be told before it listens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weft.api.listening import bind


@contextmanager
def reserved_port() -> Iterator[int]:
    """Bound here, and never listened on: the system gives it to nobody, and a server may have it by its number, again
    and again. A port that was only free a moment ago may be another test's by now."""
    with bind("127.0.0.1", 0) as reservation:
        yield reservation.getsockname()[1]
