"""A server process over a scripted model that codes: python -m tests.clients.coder SETTINGS, as JSON.

Asked with tools, it calls the one that writes files or runs commands, and when it has the result it says that it is
done. Everything but the model is real.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from tests.api.says import STYLES
from tests.api.scripted_engine import ScriptedEngine, answer
from weft.api.server import serve
from weft.backends.contract import Stream
from weft.config import load
from weft.types import GenerationRequest

WRITTEN = "print('woven')\n"
FILE = "woven.py"
DONE = "The file is written."
HELLO = "Hello from the scripted model."
COMMAND = f'echo "{WRITTEN.strip()}" > {FILE}'

ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "Write": {"file_path": FILE, "content": WRITTEN},
    "write_to_file": {"path": FILE, "content": WRITTEN},
    "exec_command": {"cmd": COMMAND},
    "shell_command": {"command": COMMAND},
    "shell": {"command": ["bash", "-c", COMMAND]},
    "bash": {"command": COMMAND},
}
"""Tools of coding agents that can write a file, and how each is called for it."""


def said_to(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Return what the model says next."""
    if messages[-1]["role"] == "tool":
        return DONE
    offered = [tool["function"]["name"] for tool in tools or ()]
    name = next((name for name in ARGUMENTS if name in offered), None)
    if name is None:
        return HELLO
    call = json.dumps({"name": name, "arguments": ARGUMENTS[name]})
    return f"I write it.<tool_call>\n{call}\n</tool_call>"


class Coder(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__()
        self.model = replace(self.model, max_model_len=400_000)
        self.styles = STYLES

    async def submit(self, request: GenerationRequest) -> Stream:
        text = said_to(self.messages, self.tools)
        self.script = answer(*(text[at : at + 8] for at in range(0, len(text), 8)))
        return await super().submit(request)


def main() -> None:
    async def start() -> Coder:
        return Coder()

    serve(start, load({"port": 0, "grpc_port": 0, **json.loads(sys.argv[1])}, env={}))


if __name__ == "__main__":
    main()
