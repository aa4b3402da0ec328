"""A client that must notice nothing: `python -m tests.e2e.canary URL KEY` streams the same chat again and again, in a
process of its own. To every line that it is sent it answers with the longest time between two pieces since the last,
in milliseconds, and how many answers were whole and the same as the first."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from tests.e2e.tiny_server import NAME
from tests.waiting import wait_until

BODY = {
    "model": NAME, "messages": [{"role": "user", "content": "Sing."}], "seed": 7, "max_tokens": 300, "ignore_eos": True,
    "stream": True,
}  # fmt: skip


class Singer:
    def __init__(self, url: str, key: str) -> None:
        self._address = urlsplit(url).netloc
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._heard = time.monotonic()
        self._longest = 0.0
        self._song = ""
        self.songs = 0
        self.trouble = ""

    def sing_on(self) -> None:
        try:
            connection = http.client.HTTPConnection(self._address, timeout=300)
            while True:
                self._sing(connection)
        except Exception as error:
            self.trouble = repr(error)

    def longest_ms(self) -> float:
        longest = max(self._longest, time.monotonic() - self._heard)
        self._longest = 0.0
        return 1000 * longest

    def _sing(self, connection: http.client.HTTPConnection) -> None:
        connection.request("POST", "/v1/chat/completions", json.dumps(BODY), self._headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        text = ""
        while line := response.readline():
            now = time.monotonic()
            self._longest, self._heard = max(self._longest, now - self._heard), now
            if line.startswith(b"data: {"):
                [choice] = json.loads(line[6:])["choices"]
                text += choice["delta"].get("content") or ""
        self._song = self._song or text
        assert text == self._song, "the song has changed"
        self.songs += 1


class Canary:
    """The canary's process, as the test sees it."""

    def __init__(self, url: str, key: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.canary", url, key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Canary:
        wait_until(lambda: self.listen()[1], "the first song")
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()

    def listen(self) -> tuple[float, int]:
        """The longest gap since the last call, in ms, and the number of songs so far. Raises what went wrong."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        longest, songs, trouble = json.loads(self._process.stdout.readline())
        assert not trouble, trouble
        return longest, songs


class Memory:
    """The resident memory of a process, and its peak, in MB."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")

    def reset_peak(self) -> None:
        (self._folder / "clear_refs").write_text("5")

    def now(self) -> float:
        return self._told("VmRSS")

    def peak(self) -> float:
        return self._told("VmHWM")

    def _told(self, name: str) -> float:
        (kilobytes,) = re.findall(rf"{name}:\s+(\d+) kB", (self._folder / "status").read_text())
        return int(kilobytes) / 1024


MAX_GAP_MS = 250
TRIES = 4
"""A machine that is busy with other work makes gaps of its own, but not each time."""


class Noticed(Struct, frozen=True):
    gap_ms: float
    growth_mb: float
    max_gap_ms: float = MAX_GAP_MS

    @property
    def is_short(self) -> bool:
        return self.gap_ms <= self.max_gap_ms


async def noticed(send: Callable[[], Awaitable[object]], canary: Canary, memory: Memory) -> Noticed:
    """Send a request, and again while the canary hears nothing for too long: returns the shortest of its longest gaps,
    and the most memory that the server took meanwhile. Where all were too long, the machine may be to blame: twice the
    gap that the canary has without the request is allowed then."""
    gap_ms, growth_mb = math.inf, 0.0
    for _ in range(TRIES):
        before = memory.now()
        memory.reset_peak()
        canary.listen()
        await send()
        gap_ms = min(gap_ms, canary.listen()[0])
        growth_mb = max(growth_mb, memory.peak() - before)
        if gap_ms <= MAX_GAP_MS:
            return Noticed(gap_ms, growth_mb)
    idle_ms = await asyncio.to_thread(_idle_gap, canary)
    return Noticed(gap_ms, growth_mb, max(MAX_GAP_MS, 2 * idle_ms))


def _idle_gap(canary: Canary) -> float:
    """Return the longest gap of some songs with nobody else."""
    _, songs = canary.listen()
    longest = 0.0

    def sung() -> bool:
        nonlocal longest
        gap_ms, now = canary.listen()
        longest = max(longest, gap_ms)
        return now >= songs + TRIES

    wait_until(sung, "some songs")
    return longest


def main() -> None:
    singer = Singer(*sys.argv[1:])
    threading.Thread(target=singer.sing_on, daemon=True).start()
    for _ in sys.stdin:
        sys.stdout.write(json.dumps([singer.longest_ms(), singer.songs, singer.trouble]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
