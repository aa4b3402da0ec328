"""An engine process with a real fault of the GPU: `launch_engine("tests.gpu.faulty", FAULT, MARKER)`.

It happens in a step, once: the process that it befalls leaves a file MARKER for those that come after it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from weft.engine import process

FIRST_STEP = 20
"""The fault happens in this step. By then every request of the test runs."""
OUT_OF_MEMORY_STEPS = 2
"""In a row: the step that is tried instead fails as well."""


def device_side_assert() -> None:
    import torch

    torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]


def illegal_access() -> None:
    import torch

    from tests.gpu.wild_store import wild_store

    wild_store[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"), 1 << 42)


def out_of_memory() -> None:
    import torch

    taken = []
    while True:
        taken.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))


FAULTS = {"assert": device_side_assert, "access": illegal_access, "memory": out_of_memory}


def install(fault: str, marker: Path) -> None:
    from weft.worker.runner import Runner

    execute = Runner.execute
    steps = OUT_OF_MEMORY_STEPS if fault == "memory" else 1
    happened = marker.exists()

    def faulty(runner, plan):
        if not happened and FIRST_STEP <= plan.step_id < FIRST_STEP + steps:
            marker.touch()
            FAULTS[fault]()
        return execute(runner, plan)

    Runner.execute = faulty


def main() -> None:
    install(sys.argv.pop(1), Path(sys.argv.pop(1)))
    process.main()
