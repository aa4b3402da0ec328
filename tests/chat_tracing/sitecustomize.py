"""Python runs this module first in every process of a traced server (see tests/chat_walk.py).

It notes the modules of weft that the process imports and, in the api process between SIGUSR1 and SIGUSR2, the modules
whose functions run.
"""

from __future__ import annotations

import inspect
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

_FOLDER = Path(__file__).parent
"""This module's own place: the tests copy it into an empty folder."""


def _role() -> str:
    if "weft.engine.fork_server" in sys.orig_argv:
        return "engine"
    return "api" if "serve" in sys.orig_argv else ""


class _Imports:
    """Finds nothing: it only hears of every import before the finders do."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "weft":
            with self._file.open("a") as notes:
                notes.write(f"{name}\n")


class _Calls:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._armed = False
        self._seen: dict[str, None] = {}

    def install(self) -> None:
        # Threads must have the profiler from their beginning; the main thread gets it with the signal.
        threading.setprofile(self._on_event)
        signal.signal(signal.SIGUSR1, self._begin)
        signal.signal(signal.SIGUSR2, self._end)

    def _begin(self, number: int, frame: FrameType | None) -> None:
        self._armed = True
        sys.setprofile(self._on_event)
        (self._folder / "armed").touch()

    def _end(self, number: int, frame: FrameType | None) -> None:
        sys.setprofile(None)
        self._armed = False
        written = self._folder / "calls.partial"
        written.write_text("\n".join(self._seen))
        written.rename(self._folder / "calls")

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        # Bodies of modules and classes have no CO_OPTIMIZED: only functions do.
        if self._armed and event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            name = str(frame.f_globals.get("__name__"))
            if name.partition(".")[0] == "weft":
                self._seen.setdefault(name)


if role := _role():
    sys.meta_path.insert(0, _Imports(_FOLDER / f"{role}.modules"))
    if role == "api":
        _Calls(_FOLDER).install()
