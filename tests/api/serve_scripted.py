"""A server process over a scripted engine: python -m tests.api.serve_scripted OPTIONS, as JSON.

It starts, and answers, when there is the file that the option `start_when`, or `answer_when`, names. Its engine has
died for good as long as there is the file of `failed_while`: what is under way ends with an error. With `backoff_s` it
is started again so soon.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.api.scripted_engine import ScriptedEngine, answer
from tests.waiting import until
from weft.api.server import serve
from weft.backends.contract import Health
from weft.config import load
from weft.errors import EngineFault, ModelError, WeftError
from weft.serving import model_slot
from weft.types import Output


class Announcing(ScriptedEngine):
    failed_while: Path | None = None

    def health(self) -> Health:
        is_failed = self.failed_while is not None and self.failed_while.exists()
        return Health(False, "failed") if is_failed else super().health()

    async def close(self) -> None:
        sys.stdout.write("engine closed\n")
        sys.stdout.flush()


def main() -> None:
    options = json.loads(sys.argv[1])
    model_slot.BACKOFF_S = options.get("backoff_s", model_slot.BACKOFF_S)

    async def wait_for(option: str) -> None:
        if option in options:
            await until(Path(options[option]).exists, option)

    async def start() -> Announcing:
        await wait_for("start_when")
        if "start_error" in options:
            raise ModelError(options["start_error"], hint="Try another.")
        middle = [Output(text=f"[{number}]" + "x" * 8000, token_ids=[1]) for number in range(options.get("chunks", 0))]
        begun = Output(text="begun", token_ids=[1])
        last = answer("done")
        if "failed_while" in options:
            last = [lambda: wait_for("failed_while"), EngineFault("There is no engine any more: it died.")]
        engine = Announcing([begun, lambda: wait_for("answer_when"), *middle, *last])
        engine.failed_while = Path(options["failed_while"]) if "failed_while" in options else None
        return engine

    try:
        serve(start, load({"port": 0, "grpc_port": 0, **options.get("settings", {})}, env={}))
    except WeftError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
