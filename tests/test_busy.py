"""`make test-busy`: its processes are busy while the command runs, and gone afterwards."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.busy import NUM_BUSY, busy_machine
from tests.waiting import PATIENCE, wait_until

TELLS_ITS_SIBLINGS = """
import os, pathlib
print(pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text())
raise SystemExit(3)
"""

FAILS_THE_SECOND_TIME = """
import pathlib, sys
seen = pathlib.Path(sys.argv[1])
print("working")
print("1 failed" if seen.exists() else "7 passed")
if seen.exists():
    raise SystemExit(1)
seen.touch()
"""


def is_gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_the_command_runs_beside_them_and_its_exit_code_is_told() -> None:
    command = [sys.executable, "-m", "tests.busy", sys.executable, "-c", TELLS_ITS_SIBLINGS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 3
    siblings, told = filter(None, done.stdout.splitlines())
    assert len(siblings.split()) == NUM_BUSY + 1 and all(is_gone(int(pid)) for pid in siblings.split())
    assert re.fullmatch(rf"run 1: exit code 3, \d+ s beside {NUM_BUSY} busy processes: {siblings.strip()}", told)


def test_runs_end_with_the_first_that_fails_and_are_told_one_by_one(tmp_path: Path) -> None:
    """The second of five fails."""
    command = [sys.executable, "-c", FAILS_THE_SECOND_TIME, str(tmp_path / "seen")]
    busy = [sys.executable, "-m", "tests.busy", "--runs", "5", *command]
    done = subprocess.run(busy, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[:4] == ["working", "7 passed", "working", "1 failed"]
    assert [re.sub(r"\d+ s ", "", line) for line in lines[4:]] == [
        f"run 1: passed, beside {NUM_BUSY} busy processes: 7 passed",
        f"run 2: exit code 1, beside {NUM_BUSY} busy processes: 1 failed",
    ]


def test_they_end_whatever_happens() -> None:
    with pytest.raises(KeyboardInterrupt), busy_machine() as processes:
        assert [process.poll() for process in processes] == [None] * NUM_BUSY
        raise KeyboardInterrupt
    assert [process.poll() for process in processes] == [-signal.SIGKILL] * NUM_BUSY


def test_they_end_with_a_parent_that_was_killed() -> None:
    command = [sys.executable, "-m", "tests.busy", "cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        wait_until(lambda: len(children.read_text().split()) == NUM_BUSY + 1, "its processes")
        pids = [int(pid) for pid in children.read_text().split()]
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    wait_until(lambda: all(is_gone(pid) for pid in pids), "their end")
