"""The table of `make coverage`: what it adds up, and which rooms it calls too low."""

from __future__ import annotations

from typing import Any

from tests.coverage_by_room import ROOMS, Covered, Room, covered, table


def file(lines: tuple[int, int], branches: tuple[int, int]) -> dict[str, Any]:
    (covered_lines, num_statements), (covered_branches, num_branches) = lines, branches
    return {
        "summary": {
            "covered_lines": covered_lines, "num_statements": num_statements,
            "covered_branches": covered_branches, "num_branches": num_branches,
        }
    }  # fmt: skip


FILES = {
    "weft/plan.py": file((10, 10), (2, 10)),
    "weft/scheduler/block_pool.py": file((90, 100), (19, 20)),
    "weft/scheduler/prefix_cache.py": file((50, 100), (0, 0)),
    "weft/api/grpc/grpc_server.py": file((1, 2), (8, 10)),
    "weft/serving/request.py": file((1, 2), (10, 10)),
}


def test_a_room_is_the_sum_of_its_files() -> None:
    scheduler, *_, api, _, whole = ROOMS
    assert covered(scheduler, FILES) == Covered(lines=200, covered_lines=140, branches=20, covered_branches=19)
    assert covered(api, FILES) == Covered(lines=4, covered_lines=2, branches=20, covered_branches=18)
    assert covered(whole, FILES).lines == 214


def test_rooms_below_their_floor_are_named_and_those_at_it_are_not() -> None:
    rooms = [Room("scheduler", ("scheduler",), 95), Room("api", ("api", "serving"), 90.5), Room("whole", (), 78)]
    text, below = table(FILES, rooms)
    assert below == ["api"]
    [_, scheduler, *_] = text.splitlines()
    assert scheduler.split() == ["scheduler", "140/200", "70.0%", "19/20", "95.0%", "95%"]


def test_a_room_without_a_measurement_is_below_its_floor() -> None:
    assert table({}, [Room("engine", ("engine",), 90)])[1] == ["engine"]
