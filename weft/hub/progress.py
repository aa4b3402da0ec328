"""What a person sees while a model is pulled: one bar, on standard error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

POLL_SECONDS = 0.2


class PullProgress:
    """A bar a stage, or silence."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._console = Console(stderr=True)

    def say(self, text: str) -> None:
        if self._shown:
            self._console.print(text, highlight=False)

    @contextmanager
    def stage(self, title: str, total_bytes: int) -> Iterator[Stage]:
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        with Progress(*columns, console=self._console, disable=not self._shown) as bars:
            yield Stage(bars, bars.add_task(title, total=total_bytes))

    @contextmanager
    def watch(self, title: str, arrived: Callable[[], int], total_bytes: int) -> Iterator[None]:
        """A bar driven by the bytes that have arrived so far, for a download that another program does."""
        with self.stage(title, total_bytes) as stage:
            done = threading.Event()

            def poll() -> None:
                while not done.wait(POLL_SECONDS):
                    stage.reached(min(arrived(), total_bytes))

            watcher = threading.Thread(target=poll, name="weft-pull-progress", daemon=True)
            watcher.start()
            try:
                yield
                stage.reached(total_bytes)
            finally:
                done.set()
                watcher.join()


class Stage:
    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars = bars
        self._task = task

    def advance(self, num_bytes: int) -> None:
        self._bars.advance(self._task, num_bytes)

    def reached(self, num_bytes: int) -> None:
        self._bars.update(self._task, completed=num_bytes)


def file_sizes(folder: Path) -> list[int]:
    """The sizes of the files below a folder, less those that vanish meanwhile."""
    sizes = []
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                sizes.append(path.stat().st_size)
        except OSError:
            continue
    return sizes
