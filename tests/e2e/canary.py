"""A client that must notice nothing: `python -m tests.e2e.canary URL KEY PID` streams the same chat again and again, in
a process of its own. To every line that it is sent it answers with what it `Heard` since the last. PID is the server's.
"""

from __future__ import annotations

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
from typing import NamedTuple
from urllib.parse import urlsplit

from msgspec import Struct

from tests.e2e.tiny_server import NAME
from tests.waiting import wait_until

BODY = {
    "model": NAME, "messages": [{"role": "user", "content": "Sing."}], "seed": 7, "max_tokens": 300, "ignore_eos": True,
    "stream": True,
}  # fmt: skip


class Heard(NamedTuple):
    gap_ms: float
    """The longest time between two pieces."""
    computed_ms: float
    """How much of such a time the server computed, at most: a busy machine adds to gaps, but not to that."""
    songs: int
    """Answers so far that were whole, and the same as the first."""


class Clock(NamedTuple):
    """Now, and the CPU time of a process until now."""

    wall: float
    cpu: float

    @classmethod
    def of(cls, pid: int) -> Clock:
        # The kernel's number of the CPU clock of a whole process.
        return cls(time.monotonic(), time.clock_gettime(~pid << 3 | 2))


class Singer:
    def __init__(self, url: str, key: str, pid: str) -> None:
        self._pid = int(pid)
        self._address = urlsplit(url).netloc
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._last = Clock.of(self._pid)
        self._longest = self._computed = 0.0
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

    def heard(self) -> Heard:
        self._hear(self._last)
        heard = Heard(1000 * self._longest, 1000 * self._computed, self.songs)
        self._longest = self._computed = 0.0
        return heard

    def _hear(self, last: Clock) -> Clock:
        now = Clock.of(self._pid)
        wall = now.wall - last.wall
        self._longest = max(self._longest, wall)
        self._computed = max(self._computed, min(wall, now.cpu - last.cpu))
        return now

    def _sing(self, connection: http.client.HTTPConnection) -> None:
        connection.request("POST", "/v1/chat/completions", json.dumps(BODY), self._headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        text = ""
        while line := response.readline():
            self._last = self._hear(self._last)
            if line.startswith(b"data: {"):
                [choice] = json.loads(line[6:])["choices"]
                text += choice["delta"].get("content") or ""
        self._song = self._song or text
        assert text == self._song, "the song has changed"
        self.songs += 1


class Canary:
    """The canary's process, as the test sees it."""

    def __init__(self, url: str, key: str, pid: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.canary", url, key, str(pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Canary:
        wait_until(lambda: self.listen().songs, "the first song")
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()

    def listen(self) -> Heard:
        """Return what was heard since the last call. Raises what went wrong."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        heard, trouble = json.loads(self._process.stdout.readline())
        assert not trouble, trouble
        return Heard(*heard)


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
"""The server may compute what is its own while the machine is busy with other work, but not each time."""


class Noticed(Struct, frozen=True):
    computed_ms: float
    """How long the server computed between two pieces, at most."""
    growth_mb: float

    @property
    def is_short(self) -> bool:
        return self.computed_ms <= MAX_GAP_MS


async def noticed(send: Callable[[], Awaitable[object]], canary: Canary, memory: Memory) -> Noticed:
    """Send a request, and again while the server computes for too long between two pieces of the canary's: returns the
    shortest of the longest such times, and the most memory that the server took meanwhile."""
    computed_ms, growth_mb = math.inf, 0.0
    for _ in range(TRIES):
        before = memory.now()
        memory.reset_peak()
        canary.listen()
        await send()
        computed_ms = min(computed_ms, canary.listen().computed_ms)
        growth_mb = max(growth_mb, memory.peak() - before)
        if computed_ms <= MAX_GAP_MS:
            break
    return Noticed(computed_ms, growth_mb)


def main() -> None:
    singer = Singer(*sys.argv[1:])
    threading.Thread(target=singer.sing_on, daemon=True).start()
    for _ in sys.stdin:
        sys.stdout.write(json.dumps([singer.heard(), singer.trouble]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
