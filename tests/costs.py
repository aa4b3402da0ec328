"""What single hostile requests cost everybody else, measured: python -m tests.costs.

Each is sent alone, by a tenant with an ordinary key, beside the stream of another. The table tells for how long that
stream stood still, how much memory the server took meanwhile, and what the answer was.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests import tiny_models
from tests.e2e.canary import Canary, Memory
from tests.e2e.hostile import Asked
from tests.e2e.hostile_clients import Http
from tests.e2e.tiny_server import NAME, GuardedServer
from tests.tiny_images import save_image_model

Fields = Callable[[], dict[str, Any]]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SLOW = {"json": {"type": "integer", "multipleOf": 123_456_789}}
FOUR_MB = 190_000


def _text(times: int) -> str:
    return "the cat sat on a mat, " * times


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _continued() -> dict[str, Any]:
    last = {"role": "assistant", "content": "a" * 20_000 + "b" + "a" * 20_000 + "\n"}
    return {"messages": [*_messages(("a" * 20_000 + "\n") * 20), last], "continue_final_message": True}


CASES: list[tuple[str, str, Fields]] = [
    ("grammar of 20,000 newlines", CHAT, lambda: {"structured_outputs": {"grammar": "\n" * 20_000}}),
    (
        "schema as a text of 8 MB",
        CHAT,
        lambda: {"structured_outputs": {"json": '{"enum":[' + "1," * 4_000_000 + "1]}"}},
    ),
    ("completion of 4 MB", COMPLETION, lambda: {"prompt": _text(FOUR_MB)}),
    ("chat of 4 MB", CHAT, lambda: {"messages": _messages(_text(FOUR_MB))}),
    ("embedding of 4 MB", "/v1/embeddings", lambda: {"input": _text(FOUR_MB)}),
    ("8 MB to /tokenize", "/tokenize", lambda: {"prompt": _text(2 * FOUR_MB), "return_token_strs": True}),
    ("2 million wrong items", COMPLETION, lambda: {"stop_token_ids": [""] * 2_000_000}),
    ("unknown field, name of 8 MB", COMPLETION, lambda: {"a" * 8_000_000: 1}),
    ("metadata of a million", CHAT, lambda: {"metadata": {str(i): 1 for i in range(1_000_000)}}),
    ("30 MB of escapes", COMPLETION, lambda: {"prompt": '"' * 15_000_000}),
    ("3 million stop ids, 32 choices", COMPLETION, lambda: {"stop_token_ids": [5] * 3_000_000, "n": 32}),
    (
        "prompt_logprobs, 128 choices",
        COMPLETION,
        lambda: {"prompt": [40 + i % 200 for i in range(500)], "prompt_logprobs": 20, "n": 128},
    ),
    (
        "logprobs, 24 choices of 400",
        COMPLETION,
        lambda: {"max_tokens": 400, "logprobs": 20, "n": 24, "ignore_eos": True},
    ),
    ("slow schema", CHAT, lambda: {"structured_outputs": SLOW}),
    ("the same again", CHAT, lambda: {"structured_outputs": SLOW}),
    ("continue_final_message, 440 KB", CHAT, _continued),
]


def asked(path: str, fields: dict[str, Any]) -> Asked:
    least: dict[str, Any] = {"model": NAME, "max_tokens": 3} if path in (CHAT, COMPLETION) else {"model": NAME}
    least |= {"messages": _messages("over")} if path == CHAT else {"prompt": "over"} if path == COMPLETION else {}
    return Asked(path, json.dumps(least | fields, separators=(",", ":")).encode())


async def measure(server: GuardedServer, canary: Canary, table: Table) -> None:
    memory, http = Memory(server.process.pid), Http(server.url, "bad")
    for path, fields in ((CHAT, {"structured_outputs": {"grammar": 'start: "a"'}}), (COMPLETION, {})):
        await http.send(asked(path, fields))
    for name, path, fields in track(CASES, description="Asking", transient=True):
        request = asked(path, fields())
        before = memory.now()
        memory.reset_peak()
        canary.listen()
        began = time.perf_counter()
        status, body = await http.send(request)
        seconds = time.perf_counter() - began
        gap_ms = canary.listen().gap_ms
        figures = (f"{len(request.body) / 1e6:.2f}", f"{gap_ms:.0f}", f"{max(0.0, memory.peak() - before):.0f}")
        table.add_row(name, *figures, str(status), f"{seconds:.2f}", f"{len(body) / 1e6:.2f}")
    http.close()


def main() -> None:
    table = Table("request", "MB in", "others wait, ms", "api process, MB", "status", "answered in, s", "MB out")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_models.save_directory("smollm2", folder / "tiny")
        images = save_image_model(folder / "dit", tiny_models.SPECS["smollm2"].hidden)
        with (
            GuardedServer(model, images, folder / "keys") as server,
            Canary(server.url, "good", server.process.pid) as canary,
        ):
            asyncio.run(measure(server, canary, table))
    Console().print(table)


if __name__ == "__main__":
    main()
