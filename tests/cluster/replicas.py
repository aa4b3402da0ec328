"""Real replicas, edges and a network between them that a test can cut."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import threading
from pathlib import Path

from tests import forked
from tests.cluster import scripted
from tests.e2e.server import Server
from tests.e2e.tiny_server import NAME
from tests.processes import descendants, is_engine
from tests.waiting import PATIENCE, wait_until

KEY = "0123456789abcdef" * 4
PATIENT = ("--heartbeat-timeout-s", "120")
"""On a busy machine a process may be silent for longer than the default allows."""
BRIEF = ("--heartbeat-timeout-s", "2")
"""For tests of silence itself: what is given up without need on a busy machine changes no answer."""


def key_file(folder: Path) -> Path:
    file = folder / "cluster.key"
    file.write_text(KEY + "\n")
    return file


class Replica:
    """`weft replica` on a tiny model, ready."""

    module = forked.WEFT

    def __init__(self, model: Path, key: Path, *flags: str, port: int = 0, threads: int = 1) -> None:
        named = (str(model), "--served-model-name", NAME, "--port", str(port), "--cluster-key-file", str(key))
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        self.process = forked.start(self.module, ("replica", *named, "--threads", str(threads), *flags), environment)
        self.log: list[str] = []
        self._reading = threading.Thread(target=self._read_log, daemon=True)
        self._reading.start()
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        line = self.process.stdout.readline() if readable else ""
        found = re.search(r"at 127\.0\.0\.1:(\d+)", line)
        assert found, f"the replica said {line!r}\n" + "".join(self.log)
        self.port = int(found[1])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def engine_pid(self) -> int:
        return next(pid for pid in descendants(self.process.pid) if is_engine(pid))

    def kill(self) -> None:
        """Kill the server, and wait until it is gone. Its engine ends with it."""
        self.process.kill()
        self.process.wait(PATIENCE)

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(PATIENCE)
        self._reading.join(PATIENCE)
        assert self.process.stdout is not None and self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)


class Edge(Server):
    """`weft serve` on replicas, with one of them connected at least."""

    def __init__(self, model: Path, key: Path, addresses: list[str], *flags: str) -> None:
        served = ("--model", str(model), "--served-model-name", NAME, "--cluster-key-file", str(key))
        super().__init__(*served, "--replica-addresses", ",".join(addresses), *flags)

    def connected(self) -> int:
        """How many replicas take requests now."""
        return len(re.findall(r"^weft_replica_ready{[^}]*} 1", self.get("/metrics").text, re.MULTILINE))

    def wait_connected(self, count: int) -> None:
        wait_until(lambda: self.connected() == count, f"{count} connected replicas")


class ScriptedServer(Server):
    """`weft serve` with a scripted engine of its own."""

    module = scripted.MODULE


class ScriptedReplica(Replica):
    module = scripted.MODULE


class Proxy:
    """A network between an edge and a replica, in a thread of its own, that can be cut."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._flows: asyncio.Event
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_up.wait(PATIENCE)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)

    def silence(self) -> None:
        """Pass nothing on from now on, in either direction; no connection is closed."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def resume(self) -> None:
        """Pass everything on again, also what came meanwhile."""
        self._loop.call_soon_threadsafe(self._flows.set)

    def reset(self) -> None:
        """Reset all connections."""

        def abort() -> None:
            for pair in self._pairs:
                for writer in pair:
                    writer.transport.abort()
            self._pairs.clear()

        self._loop.call_soon_threadsafe(abort)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        for pair in self._pairs:
            for writer in pair:
                writer.transport.abort()
        self._server.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _listen(self) -> None:
        self._flows = asyncio.Event()
        self._flows.set()
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._is_up.set()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._flows.wait()
            theirs, ours = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._pairs.append((writer, ours))
        await asyncio.gather(self._pass(reader, ours), self._pass(theirs, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            writer.transport.abort()
        else:
            writer.close()
