"""The five clients of the kill matrix: a chat stream, a tool call, an image, embeddings and a batch.

Each asks a server for something that takes seconds, tells whenever anything came, and returns the pieces of its answer,
whose order and number are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

from tests.cluster.streams import CHAT, events, post
from tests.e2e.tiny_server import NAME
from tests.waiting import PATIENCE, wait_until

Seen = Callable[[], None]
"""Called when bytes of an answer came."""

ROWS = {"type": "array", "items": {"type": "integer"}, "minItems": 30, "maxItems": 30}
WEAVE = {"name": "weave", "parameters": {"type": "object", "properties": {"rows": ROWS}, "required": ["rows"]}}


class Refused(Exception):
    """The server said no, or the stream has an error in it."""


def chat(url: str, seen: Seen) -> list[str]:
    pieces: list[str] = []
    for event in events(url, "/v1/chat/completions", CHAT | {"max_tokens": 600}):
        seen()
        for choice in _choices(event):
            pieces += [one["token"] for one in (choice.get("logprobs") or {}).get("content", [])]
            pieces += ["end: " + choice["finish_reason"]] if choice["finish_reason"] else []
    return pieces


def tools(url: str, seen: Seen) -> list[str]:
    """A call whose arguments a grammar bounds, streamed: the pieces are its numbers."""
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Weave a row. " * 100}],
        "tools": [{"type": "function", "function": WEAVE}],
        "tool_choice": {"type": "function", "function": {"name": "weave"}},
        "seed": 5,
        "max_tokens": 4000,
        "stream": True,
    }
    name = arguments = ""
    for event in events(url, "/v1/chat/completions", body):
        seen()
        for choice in _choices(event):
            for call in choice["delta"].get("tool_calls") or ():
                name += call["function"].get("name") or ""
                arguments += call["function"].get("arguments") or ""
    return [name, *map(str, json.loads(arguments)["rows"])]


def image(url: str, seen: Seen) -> list[str]:
    """An image, with an event for every step: one that comes again is a piece too many."""
    body = {"prompt": "a row", "seed": 4, "num_inference_steps": 400, "stream": True}
    pieces: list[str] = []
    last = 0
    for event in events(url, "/v1/images/generations", body):
        seen()
        if "error" in event:
            raise Refused(str(event["error"]))
        if "b64_json" in event:
            pieces.append(event["b64_json"])
        elif (step := event["step"]) > last:
            last = step
        else:
            pieces.append(f"step {step} after {last}")
    return pieces


def embeddings(url: str, seen: Seen) -> list[str]:
    texts = [f"row {number} " * 300 for number in range(16)]
    answer = post(url, "/v1/embeddings", {"model": NAME, "input": texts})
    seen()
    # Rounding depends on what shares a step.
    return [json.dumps([round(value, 3) + 0.0 for value in one["embedding"]]) for one in answer["data"]]


def batch(url: str, seen: Seen) -> list[str]:
    """A file of eight chats. Its progress is what its client can see."""
    body = {"model": NAME, "messages": CHAT["messages"], "max_tokens": 100, "ignore_eos": True}
    line = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [{"custom_id": f"line-{number}", "body": body | {"seed": number}} | line for number in range(8)]
    content = "\n".join(map(json.dumps, lines))
    files = {"file": ("batch.jsonl", content)}
    told = httpx.post(url + "/v1/files", files=files, data={"purpose": "batch"}, timeout=PATIENCE)
    wanted = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "input_file_id": told.json()["id"]}
    made = post(url, "/v1/batches", wanted)
    progress: dict[str, Any] = {}

    def has_ended() -> bool:
        now = httpx.get(f"{url}/v1/batches/{made['id']}", timeout=PATIENCE).json()
        if now["request_counts"] != progress.get("request_counts") or now["status"] != progress["status"]:
            seen()
        progress.update(now)
        return now["status"] in ("completed", "failed", "cancelled", "expired")

    wait_until(has_ended, "the batch's end")
    if progress["request_counts"]["failed"] or not progress["output_file_id"]:
        raise Refused(f"the batch is {progress['status']}, {progress['request_counts']}")
    answers = httpx.get(f"{url}/v1/files/{progress['output_file_id']}/content", timeout=PATIENCE).text.splitlines()
    read = [json.loads(answer) for answer in answers]
    said = [(one["custom_id"], one["response"]["body"]["choices"][0]["message"]["content"]) for one in read]
    return [f"{name}: {text}" for name, text in sorted(said)]


def _choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    if "error" in event:
        raise Refused(str(event["error"]))
    found: list[dict[str, Any]] = event.get("choices", [])
    return found


CLIENTS: dict[str, Callable[[str, Seen], list[str]]] = {
    "chat stream": chat,
    "tools": tools,
    "image": image,
    "embeddings": embeddings,
    "batch": batch,
}
