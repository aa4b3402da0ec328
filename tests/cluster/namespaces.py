"""A network of machines on this one: network namespaces, each with an interface on one bridge, whose cables can be
pulled. It needs Linux and root.

The names of what is made have this process's id, so that a run that was killed leaves nothing for long: the next one
removes what processes that are gone have left.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

from tests.processes import runs
from tests.waiting import wait_until

_PREFIX = "wkm"
"""Names of interfaces have 15 characters at most: this, the id of the process, and a number."""


def why_not() -> str:
    """Return why there can be no namespaces; empty: there can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root, and `ip` of iproute2"
    name = f"{_PREFIX}{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"`ip netns add` failed: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


class Namespaces:
    """So many machines, numbered from 0. A context manager that leaves no process and no interface."""

    def __init__(self, count: int) -> None:
        remove_left()
        self._count = count
        self._stem = f"{_PREFIX}{os.getpid()}"
        # Of the addresses for tests of networks (RFC 2544), which no network uses.
        self._net = f"198.18.{os.getpid() % 256}"
        try:
            _ip("link", "add", self._stem, "type", "bridge")
            _ip("addr", "add", f"{self._net}.1/24", "dev", self._stem)
            _ip("link", "set", self._stem, "up")
            for number in range(count):
                self._add(number)
        except BaseException:
            self.close()
            raise

    def _add(self, number: int) -> None:
        name, cable = self._name(number), self._cable(number)
        _ip("netns", "add", name)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", cable, "master", self._stem, "up")
        _ip("-n", name, "addr", "add", f"{self.host(number)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", "eth0", "up")

    def host(self, number: int) -> str:
        """Return the address of a machine."""
        return f"{self._net}.{number + 10}"

    def number(self, host: str) -> int:
        return int(host.rpartition(".")[2]) - 10

    def under(self, number: int) -> tuple[str, ...]:
        """Return the command that runs another on a machine, in the same process."""
        return ("ip", "netns", "exec", self._name(number))

    def cut(self, number: int) -> None:
        """Pull a machine's cable: what is sent is lost, and no connection is closed."""
        _ip("link", "set", self._cable(number), "down")

    def join(self, number: int) -> None:
        """Plug the cable in again."""
        _ip("link", "set", self._cable(number), "up")

    def pids(self, number: int) -> list[int]:
        """Return all processes of a machine."""
        return _pids(self._name(number))

    def kill(self, number: int) -> None:
        """End a machine's processes, all at once."""
        _kill_all(self._name(number))

    def close(self) -> None:
        _remove(self._stem)

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _name(self, number: int) -> str:
        return f"{self._stem}-{number}"

    def _cable(self, number: int) -> str:
        return f"{self._stem}-{number}"


def remove_left() -> None:
    """Remove what processes that are gone have left."""
    interfaces = [path.name for path in Path("/sys/class/net").iterdir()]
    for stem in {name.partition("-")[0] for name in (*_namespaces(), *interfaces)}:
        found = re.fullmatch(rf"{_PREFIX}(\d+)", stem)
        if found and not Path(f"/proc/{found[1]}").exists():
            _remove(stem)


def _remove(stem: str) -> None:
    """Remove the namespaces and the bridge of one process. Interfaces go with their namespaces."""
    for name in _namespaces():
        if name.startswith(f"{stem}-"):
            _kill_all(name)
            _ip("netns", "del", name)
    if Path(f"/sys/class/net/{stem}").exists():
        _ip("link", "del", stem)


def _kill_all(name: str) -> None:
    def is_empty() -> bool:
        for pid in _pids(name):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return not _pids(name)

    wait_until(is_empty, f"the end of all in {name}")


def _pids(name: str) -> list[int]:
    """Return the processes of a namespace that run; one that has ended, and was not waited for, does not."""
    told = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
    return [int(pid) for pid in told.split() if runs(int(pid))]


def _namespaces() -> list[str]:
    told = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in told.splitlines() if line]


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
