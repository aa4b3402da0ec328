"""Python runs this module first in every process of a server under chaos (see tests/chaos.py).

In the fork server, whose forks the engines are, it lets a step fail when a file `fault` beside this module names a
fault. The engine that it befalls takes the file away, and leaves its process id in `struck`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
"""This module's own place: the driver copies it into an empty folder."""


def _install() -> None:
    from weft.worker.runner import Runner

    execute = Runner.execute

    def faulty(runner: Any, plan: Any) -> Any:
        if fault := _take():
            _fail(fault)
        return execute(runner, plan)

    Runner.execute = faulty  # type: ignore[method-assign]


def _take() -> str:
    try:
        fault = (_FOLDER / "fault").read_text()
    except FileNotFoundError:
        return ""
    (_FOLDER / "struck").write_text(str(os.getpid()))
    (_FOLDER / "fault").unlink()
    return fault


def _fail(fault: str) -> None:
    if fault == "exception":
        raise ArithmeticError("a fault was injected")
    from tests.gpu.faulty import FAULTS

    FAULTS[fault]()


if "weft.engine.fork_server" in sys.orig_argv:
    _install()
