"""A short version of `python -m tests.cluster.kill_matrix`; other tests have images and the other deaths."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.kill_matrix import run

CLIENTS = ["chat stream", "tools", "batch"]


def test_nothing_is_lost_or_repeated(tmp_path: Path) -> None:
    outcomes = run(["replica killed", "edge killed"], CLIENTS, tmp_path)
    for cell, seen in outcomes.items():
        assert all(one.lost == one.repeated == 0 and one.saw != "ANOTHER ANSWER" for one in seen), (cell, seen)
    assert all(one.saw == "its answer" for client in CLIENTS for one in outcomes["replica killed", client])
