"""An engine process with a fault: `python -m tests.engine.faulty FAULT FD`.

Whenever a step has a request whose tokens hold POISON, the fault happens. Everything else is the real engine.
"""

from __future__ import annotations

import os
import sys

from weft.engine import process

POISON = 4242


def install(fault: str) -> None:
    from weft.worker.runner import Runner

    execute, compute_logits = Runner.execute, Runner._logits

    def poisoned_rows(runner: Runner, rows: list) -> list[int]:
        return [i for i, row in enumerate(rows) if POISON in runner.table.tokens[row.row, : row.start + row.count]]

    def faulty_execute(runner, plan):
        if any(POISON in admission.token_ids for admission in plan.admit):
            if fault == "exit":
                os._exit(3)
            if fault == "raise":
                raise ArithmeticError("the poison worked")
        return execute(runner, plan)

    def faulty_logits(runner, inputs):
        logits = compute_logits(runner, inputs)
        if fault == "nan":
            for i in poisoned_rows(runner, inputs.sampling):
                logits[i] = float("nan")
        return logits

    Runner.execute, Runner._logits = faulty_execute, faulty_logits


if __name__ == "__main__":
    fault = sys.argv.pop(1)
    install(fault)
    process.main()
