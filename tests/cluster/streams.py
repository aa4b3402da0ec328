"""What clients of an edge ask for in these tests, and what they read."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from tests.e2e.tiny_server import NAME
from tests.waiting import PATIENCE, wait_until

CHAT: dict[str, Any] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "Weave a row."}],
    "max_tokens": 200,
    "temperature": 1.0,
    "seed": 11,
    "logprobs": True,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


class Following:
    """A streamed chat that is read in a thread."""

    def __init__(self, url: str, body: dict[str, Any] | None = None) -> None:
        self.body = {**CHAT, **(body or {})}
        self.pieces: list[str] = []
        self.tokens: list[tuple[str, float]] = []
        self.finish = ""
        self.usage: dict[str, Any] = {}
        self.error: Any = None
        self._url = url
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def wait_for(self, num_tokens: int) -> Following:
        wait_until(lambda: len(self.tokens) >= num_tokens or not self._thread.is_alive(), f"{num_tokens} tokens")
        assert self.error is None, self.error
        return self

    def ended(self) -> Following:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self

    def answer(self) -> tuple[str, list[str], str]:
        """What must be the same whatever dies meanwhile."""
        self.ended()
        assert self.error is None, self.error
        return self.text, [token for token, _ in self.tokens], self.finish

    def _read(self) -> None:
        try:
            for event in events(self._url, "/v1/chat/completions", self.body):
                self._take(event)
        except (httpx.HTTPError, AssertionError) as error:
            self.error = error

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", []):
            self.pieces.append(choice["delta"].get("content") or "")
            self.tokens += [(one["token"], one["logprob"]) for one in (choice.get("logprobs") or {}).get("content", [])]
            self.finish = choice["finish_reason"] or self.finish


def events(url: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer."""
    with httpx.stream("POST", url + path, json=body, timeout=PATIENCE) as response:
        if response.status_code != 200:
            response.read()
            raise AssertionError(f"{response.status_code}: {response.text}")
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(url + path, json=body, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Return what each call returns, made at the same time."""
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        results[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return results
