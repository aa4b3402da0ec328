"""An engine process with a fault: `launch_engine("tests.engine.faulty", FAULT)`.

Whenever a step has a request whose tokens hold POISON, the fault happens. Everything else is the real engine.
"""

from __future__ import annotations

import os
import sys

from weft.engine import process

POISON = 4242


def install(fault: str) -> None:
    from weft.worker.runner import Runner

    execute, sampled = Runner.execute, Runner._sampled

    def faulty_execute(runner, plan):
        if any(POISON in admission.token_ids for admission in plan.admit):
            if fault == "exit":
                os._exit(3)
            if fault == "raise":
                raise ArithmeticError("the poison worked")
        return execute(runner, plan)

    def faulty_sampled(runner, rows, outcome):
        for i, row in enumerate(rows):
            if fault == "nan" and POISON in runner.stepper.table.tokens[row.row, : row.start + row.count]:
                outcome.peaks[i] = outcome.logits[i, 0] = float("nan")
        return sampled(runner, rows, outcome)

    Runner.execute, Runner._sampled = faulty_execute, faulty_sampled


def main() -> None:
    install(sys.argv.pop(1))
    process.main()
