"""A real server in a process of its own, on a free port."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

import weft
from tests.processes import descendants, is_engine
from tests.waiting import PATIENCE


@contextmanager
def run_first(module: Path, folder: Path) -> Iterator[None]:
    """Let processes that are started meanwhile, and theirs, run a `sitecustomize.py` first. It is copied into the
    folder, where it may read and write."""
    before = os.environ.get("PYTHONPATH")
    shutil.copy(module, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), before or str(Path(weft.__file__).parents[1])])
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


class Server:
    """`weft serve`, ready. A context manager that leaves nothing running."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weft", "serve", "--port", "0", "--grpc-port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.log: list[str] = []
        self._reading = threading.Thread(target=self._read_log, daemon=True)
        self._reading.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"at (http://\S+)", line)
        if found is None:
            self.process.wait(PATIENCE)
            self._close()
            raise AssertionError(f"the server said {line!r}\n" + "".join(self.log))
        self.url = found[1]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(PATIENCE)
        self._close()

    def _close(self) -> None:
        self._reading.join(PATIENCE)
        assert self.process.stdout is not None and self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE)

    def metric(self, name: str) -> float:
        found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.get("/metrics").text, re.MULTILINE)
        assert found, f"no metric {name}"
        return float(found[1])

    def children(self) -> list[int]:
        return descendants(self.process.pid)

    def engine_pid(self) -> int:
        return next(pid for pid in self.children() if is_engine(pid))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)
