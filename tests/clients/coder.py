"""A server process over a scripted model that codes: python -m tests.clients.coder SETTINGS, as JSON.

Asked with tools, it calls the one that writes files or runs commands; an agent without tools gets the file in the form
that its prompt describes. When the file is written the model says that it is done. Everything but the model is real.
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

WRITERS = (
    "Write",
    "write",
    "write_to_file",
    "exec_command",
    "shell_command",
    "run_shell_command",
    "shell",
    "bash",
    "Bash",
)
"""Tools of coding agents that can write a file or run a command; the first that is offered is called."""

VALUES = {
    **dict.fromkeys(("file_path", "filePath", "filepath", "path"), FILE),
    **dict.fromkeys(("cmd", "command"), COMMAND),
    "content": WRITTEN,
}
"""What the arguments of these tools are, by their names."""

IN_TEXT = {
    "*file listing*": (f"{DONE}\n\n{FILE}\n```\n{WRITTEN}```\n", DONE),
    "<write_to_file>": (
        f"<write_to_file>\n<path>{FILE}</path>\n<content>\n{WRITTEN}</content>\n</write_to_file>",
        f"<attempt_completion>\n<result>{DONE}</result>\n</attempt_completion>",
    ),
    "```save": (f"```save {FILE}\n{WRITTEN}```", DONE),
}
"""Words of an agent's prompt that tell how files are written in text (aider, Cline, gptme): the file, and the end."""


def said_to(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Return what the model says next."""
    if messages[-1]["role"] == "tool":
        return DONE
    offered = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools or ()}
    name = next((name for name in WRITERS if name in offered), None)
    if name is not None:
        call = json.dumps({"name": name, "arguments": arguments(offered[name])})
        return f"I write it.<tool_call>\n{call}\n</tool_call>"
    told = json.dumps(messages)
    for words, (file, end) in IN_TEXT.items():
        if words in told:
            is_written = any(message["role"] == "assistant" and FILE in str(message) for message in messages)
            return end if is_written else file
    return HELLO


def arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value for every argument that a tool's schema requires."""
    made: dict[str, Any] = {}
    for name in schema.get("required", ()):
        kind = schema["properties"][name].get("type")
        if kind == "array":
            made[name] = ["bash", "-c", COMMAND]
        else:
            made[name] = False if kind == "boolean" else VALUES.get(name, "Write the file.")
    return made


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
