"""One pull of a model at a time, across processes."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weft.errors import ModelError
from weft.hub.files import locks_folder


@contextmanager
def pull_lock(name: str, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of `name`; `on_wait` is called once when another process has it.

    The kernel drops the lock when its process ends, however it ends, so the file itself may stay for ever.
    """
    folder = locks_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"{name}.lock").open("ab")
    except OSError as error:
        raise ModelError(
            f"{folder}: cannot be written: {error.strerror}.", hint="Set WEFT_HOME to a folder that can."
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
