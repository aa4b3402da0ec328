"""An engine process with a fault: `launch_engine("tests.engine.faulty", FAULT)`.

Whenever a step has a request whose tokens begin with POISON, the fault happens: with "queue" when such a request is
queued, and with "adapter" when the adapter of any request is read. Everything else is the real engine.
"""

from __future__ import annotations

import os
import sys
import threading

from weft.engine import process

POISON = [1, 42, 2]


def install(fault: str) -> None:
    from weft.scheduler.scheduler import Scheduler
    from weft.worker.lora_rows import LoraRows
    from weft.worker.runner import Runner

    add, read = Scheduler.add, LoraRows.read
    execute, sampled = Runner.execute, Runner._sampled

    def faulty_execute(runner, plan):
        if any([*admission.token_ids[: len(POISON)]] == POISON for admission in plan.admit):
            if fault == "exit":
                os._exit(3)
            if fault == "raise":
                raise ArithmeticError("the poison worked")
            if fault == "wait":
                threading.Event().wait()
        return execute(runner, plan)

    def faulty_sampled(runner, rows, outcome, *others):
        for i, row in enumerate(rows):
            if fault == "nan" and runner.stepper.table.tokens[row.row, : len(POISON)].tolist() == POISON:
                outcome.peaks[i] = outcome.logits[i, 0] = float("nan")
        return sampled(runner, rows, outcome, *others)

    def faulty_add(scheduler, request):
        if fault == "queue" and [*request.prompt_token_ids] == POISON:
            os._exit(3)
        return add(scheduler, request)

    def faulty_read(adapters, adapter):
        if fault == "adapter":
            adapters._reader.submit(os._exit, 3)
        return read(adapters, adapter)

    Scheduler.add, LoraRows.read = faulty_add, faulty_read
    Runner.execute, Runner._sampled = faulty_execute, faulty_sampled


def main() -> None:
    install(sys.argv.pop(1))
    process.main()
