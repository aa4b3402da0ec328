"""The progress of a benchmark: a bar in a terminal, and where its output is piped a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINE_SECONDS = 5.0


class Advance(Protocol):
    def __call__(self, description: str, count: int = 1) -> None:
        """Tell that something of this description is done."""


@contextmanager
def progress(total: int, first: str) -> Iterator[Advance]:
    """Show how much of a total is done (0: it is not known); `first`: what is done before anything counts."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(first, total=total or None)

        def advance(description: str, count: int = 1) -> None:
            bar.update(task, advance=count, description=description)

        yield advance


class _Lines:
    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._began = self._said = time.monotonic()

    def __call__(self, description: str, count: int = 1) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._said >= LINE_SECONDS:
            self._said = now
            done = f"{self._done} of {self._total}" if self._total else f"{self._done}"
            sys.stderr.write(f"{now - self._began:.0f} s: {done}, {description}\n")
            sys.stderr.flush()
