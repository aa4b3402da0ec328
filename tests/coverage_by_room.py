"""The suite under coverage, with a floor for every room: python -m tests.coverage_by_room -m pytest ...

Processes that tests start, the engine's among them, are measured as well ([tool.coverage.run] in pyproject.toml). What
an engine did that was killed is lost, and functions that numba or Triton compile are not counted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "coverage"


class Room(Struct, frozen=True):
    name: str
    packages: tuple[str, ...]
    """Below weft/; none: all of it."""
    floor: float
    """Per cent of its branches."""


ROOMS = (
    Room("scheduler", ("scheduler",), 95),
    Room("engine", ("engine",), 90),
    Room("text", ("text",), 90),
    Room("api", ("api", "serving"), 90),
    Room("backends", ("backends", "compat"), 90),
    Room("whole", (), 85),
)


class Covered(Struct, frozen=True):
    lines: int = 0
    covered_lines: int = 0
    branches: int = 0
    covered_branches: int = 0

    @property
    def line_percent(self) -> float:
        return 100 * self.covered_lines / self.lines if self.lines else 0.0

    @property
    def branch_percent(self) -> float:
        return 100 * self.covered_branches / self.branches if self.branches else 0.0


def covered(room: Room, files: Mapping[str, Any]) -> Covered:
    """The sum over a room's files, from the report that `coverage json` writes."""
    summaries = [file["summary"] for path, file in files.items() if _is_in(room, path)]
    return Covered(
        lines=sum(summary["num_statements"] for summary in summaries),
        covered_lines=sum(summary["covered_lines"] for summary in summaries),
        branches=sum(summary["num_branches"] for summary in summaries),
        covered_branches=sum(summary["covered_branches"] for summary in summaries),
    )


def _is_in(room: Room, path: str) -> bool:
    weft, _, rest = Path(path).as_posix().partition("/")
    return weft == "weft" and (not room.packages or rest.partition("/")[0] in room.packages)


def table(files: Mapping[str, Any], rooms: Iterable[Room] = ROOMS) -> tuple[str, list[str]]:
    """What was covered, and the rooms that are below their floor."""
    lines = [f"{'room':<10} {'lines':>15} {'':>7} {'branches':>15} {'':>7} {'floor':>6}"]
    below = []
    for room in rooms:
        found = covered(room, files)
        lines.append(
            f"{room.name:<10} {f'{found.covered_lines}/{found.lines}':>15} {found.line_percent:>6.1f}%"
            f" {f'{found.covered_branches}/{found.branches}':>15} {found.branch_percent:>6.1f}% {room.floor:>5g}%"
        )
        if found.branch_percent < room.floor:
            below.append(room.name)
    return "\n".join(lines), below


def main(suite: list[str]) -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    report = FOLDER / "report.json"
    settings = {"COVERAGE_FILE": str(FOLDER / "data"), "COVERAGE_RCFILE": str(ROOT / "pyproject.toml")}
    coverage = [sys.executable, "-m", "coverage"]

    def step(*words: str) -> int:
        return subprocess.run([*coverage, *words], cwd=ROOT, env=os.environ | settings, check=False).returncode

    failed = step("run", *suite)
    for words in (("combine", "--quiet"), ("json", "--quiet", "-o", str(report))):
        if code := step(*words):
            return code
    text, below = table(json.loads(report.read_text())["files"])
    print(text)
    if below:
        print(f"below the floor: {', '.join(below)}")
    return failed or int(bool(below))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
