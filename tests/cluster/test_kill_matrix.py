"""Cells of `python -m tests.cluster.kill_matrix` that no other test has, and what it is made of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.kill_matrix import compared, run
from tests.cluster.namespaces import Namespaces, remove_left, why_not
from tests.waiting import PATIENCE

CELLS = {"replica killed": ["tools", "batch"], "edge killed": ["chat stream"]}


def test_nothing_is_lost_or_repeated(tmp_path: Path) -> None:
    outcomes = run(CELLS, tmp_path)
    assert list(outcomes) == [(row, client) for row, clients in CELLS.items() for client in clients]
    assert all(one.is_right for one in outcomes.values()), outcomes
    assert all(outcomes["replica killed", client].moved for client in CELLS["replica killed"])


@pytest.mark.parametrize(("pieces", "lost", "repeated"), [("abc", 0, 0), ("ac", 1, 0), ("abbc", 0, 1), ("acb", 0, 0)])
def test_what_is_lost_and_repeated_is_counted(pieces: str, lost: int, repeated: int) -> None:
    saw, *counts = compared("its answer", list(pieces), list("abc"))
    assert counts == [lost, repeated]
    assert (saw == "its answer") == (pieces == "abc")


def test_machines_of_a_process_that_was_killed_are_removed() -> None:
    if why := why_not():
        pytest.skip(why)
    made = "from tests.cluster.namespaces import Namespaces; import os; print(*Namespaces(1).under(0), flush=True)"
    told = subprocess.run(
        [sys.executable, "-c", f"{made}; os._exit(0)"], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    remove_left()
    assert subprocess.run([*told.stdout.split(), "true"], capture_output=True, check=False).returncode != 0


def test_nothing_outlives_its_machine() -> None:
    if why := why_not():
        pytest.skip(why)
    with Namespaces(2) as machines:
        process = subprocess.Popen([*machines.under(1), "sleep", str(PATIENCE)])
        machines.kill(0)
        assert process.poll() is None
    assert process.wait(PATIENCE) < 0
