"""A real server in a process of its own, on a free port."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import httpx

import weft
from tests import forked
from tests.processes import descendants, is_engine
from tests.waiting import PATIENCE, wait_until


def run_first(module: str | Path, folder: Path) -> dict[str, str]:
    """Return an environment in which every process runs a module first, given as its text or its file. It lies in the
    folder, where it may read and write."""
    text = module if isinstance(module, str) else module.read_text()
    (folder / "sitecustomize.py").write_text(text)
    root = str(Path(weft.__file__).parents[1])
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH") or root])}


class Server:
    """`weft serve`, ready. A context manager that leaves nothing running."""

    key = ""
    """The API key for what is asked of the server itself, where it wants one."""
    module = forked.WEFT
    """The module whose main() is the command `weft`."""

    def __init__(
        self,
        *flags: str,
        under: Sequence[str] = (),
        env: Mapping[str, str] = MappingProxyType({}),
        is_fork: bool = True,
    ) -> None:
        """`under`: a command that runs the server's own, in the same process. With it or with variables that are not
        Weft's the server is no fork of tests/forked.py, nor where the test looks at the process itself."""
        words = ("serve", "--port", "0", "--grpc-port", "0", *flags)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **env}
        if is_fork and not under and all(name.startswith("WEFT_") for name in env):
            self.process = forked.start(self.module, words, environment)
        else:
            self.process = subprocess.Popen(
                [*under, sys.executable, "-m", self.module.removesuffix(".__main__"), *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        self.log: list[str] = []
        self._reading = threading.Thread(target=self._read_log, daemon=True)
        self._reading.start()
        line = self._first_line()
        found = re.search(r"at (http://\S+)", line)
        if found is None:
            if self.process.poll() is None:
                # A server that hangs tells in its log where.
                self.process.send_signal(signal.SIGABRT)
            self.process.wait(PATIENCE)
            self._close()
            raise AssertionError(f"the server said {line!r}\n" + "".join(self.log))
        self.url = found[1]

    def _first_line(self) -> str:
        """Return what the server says when it is ready; empty if it has ended, or says nothing for too long."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        return self.process.stdout.readline() if readable else ""

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
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.get(self.url + path, headers=headers, timeout=PATIENCE)

    def metric(self, name: str) -> float:
        found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.get("/metrics").text, re.MULTILINE)
        assert found, f"no metric {name}"
        return float(found[1])

    def wait_until_ready(self) -> None:
        """A busy machine makes heartbeats late, and for as long the server is not ready."""
        wait_until(lambda: self.get("/health").status_code == 200, "a server that is ready")

    def grpc_port(self) -> int:
        told = re.compile(r"gRPC answers on port (\d+)")
        wait_until(lambda: told.search("".join(self.log)), "gRPC's port")
        (port,) = told.findall("".join(self.log))
        return int(port)

    def children(self) -> list[int]:
        return descendants(self.process.pid)

    def engine_pid(self) -> int:
        return next(pid for pid in self.children() if is_engine(pid))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)
