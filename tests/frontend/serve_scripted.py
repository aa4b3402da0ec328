"""A server process over a scripted engine: python -m tests.frontend.serve_scripted SETTINGS, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from tests.frontend.scripted_engine import ScriptedEngine, answer
from weft.config import load
from weft.errors import ModelError, WeftError
from weft.frontend.server import serve
from weft.types import Delta


class Announcing(ScriptedEngine):
    async def close(self) -> None:
        sys.stdout.write("engine closed\n")
        sys.stdout.flush()


def main() -> None:
    options = json.loads(sys.argv[1])

    async def start() -> Announcing:
        await asyncio.sleep(options.get("start_s", 0))
        if "start_error" in options:
            raise ModelError(options["start_error"], hint="Try another.")
        middle = [Delta(text=f"[{number}]" + "x" * 8000, token_ids=[1]) for number in range(options.get("chunks", 0))]
        begun, pause = Delta(text="begun", token_ids=[1]), float(options.get("answer_s", 0))
        return Announcing([begun, pause, *middle, *answer("done")])

    try:
        serve(start, load({"port": 0, "grpc_port": 0, **options.get("settings", {})}, env={}))
    except WeftError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
