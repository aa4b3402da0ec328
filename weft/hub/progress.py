"""Reports the progress of a pull to the caller, and shows it as bars."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

Stage = Literal["resolve", "download", "verify"]

POLL_SECONDS = 0.2
"""Seconds between two looks at a download."""
STALL_SECONDS = 180.0
"""Seconds without data after which a download is given up."""


class Progress(Struct, frozen=True):
    stage: Stage
    done: int = 0
    total: int = 0
    """Bytes of the stage; 0 where it does not count them."""
    note: str = ""
    """The model, or why it waits."""


Report = Callable[[Progress], None]


def unheard(progress: Progress) -> None:
    pass


@contextmanager
def with_bars(report: Report) -> Iterator[Report]:
    """Return a report that also shows bars on standard error."""
    bars = _Bars()

    def show(progress: Progress) -> None:
        bars.show(progress)
        report(progress)

    try:
        yield show
    finally:
        bars.close()


class _Bars:
    """A progress bar for each stage. Nothing is printed before there is something to show."""

    def __init__(self) -> None:
        self._display: RichProgress | None = None
        self._tasks: dict[Stage, TaskID] = {}

    def show(self, progress: Progress) -> None:
        if progress.stage == "resolve" and progress.note:
            self._started().console.print(progress.note, highlight=False, markup=False)
        elif progress.total:
            display = self._started()
            if progress.stage not in self._tasks:
                title = f"{'Downloading' if progress.stage == 'download' else 'Checking'} {progress.note}"
                self._tasks[progress.stage] = display.add_task(title, total=progress.total)
            display.update(self._tasks[progress.stage], completed=progress.done, total=progress.total)

    def close(self) -> None:
        if self._display is not None:
            self._display.stop()

    def _started(self) -> RichProgress:
        if self._display is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
            self._display = Progress(*columns, console=Console(stderr=True))
            self._display.start()
        return self._display


def file_sizes(folder: Path) -> list[int]:
    """Return the sizes of the files below a folder, without those that vanish meanwhile, or whose folder does."""
    sizes = []
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                sizes.append(Path(parent, name).stat().st_size)
    return sizes
