"""A command of Weft in a real pseudo-terminal: keys go in, and what a terminal would show comes out."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from tests import forked
from tests.waiting import PATIENCE, wait_until

CTRL_C, CTRL_D, ENTER, ALT_ENTER, LEFT, UP = "\x03", "\x04", "\r", "\x1b\r", "\x1b[D", "\x1b[A"
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_=>78]")


def pasted(text: str) -> str:
    """Return what a terminal sends for a paste."""
    return f"\x1b[200~{text}\x1b[201~"


class PtySession:
    """A process whose terminal is this test. A context manager that leaves nothing running."""

    def __init__(
        self,
        *words: str,
        env: Mapping[str, str],
        cwd: Path,
        columns: int = 80,
        stdout: BinaryIO | None = None,
        is_fork: bool = True,
    ) -> None:
        """`stdout`: where standard output goes, if not to the terminal as well. `is_fork`: False where the test is of
        how the process itself starts."""
        self.raw = ""
        self.process: forked.Forked | subprocess.Popen[bytes]
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        root = str(Path(__file__).parents[1])
        # No terminal answers here where the cursor is. Workers of the suite have a width of their own.
        terminal = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": str(columns), "LINES": "40"}
        environment = {**os.environ, **terminal, "PYTHONPATH": root, **env}
        if is_fork and forked.can_fork():
            terminal_file = Path(os.ttyname(slave))
            output = (slave if stdout is None else stdout.fileno(), slave)
            self.process = forked.Forked(forked.WEFT, words, environment, cwd, terminal_file, output)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "weft", *words],
                stdin=slave,
                stdout=slave if stdout is None else stdout,
                stderr=slave,
                env=environment,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> PtySession:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        os.close(self._master)

    @property
    def text(self) -> str:
        """All that was shown, without the sequences that steer a terminal."""
        return ESCAPES.sub("", self.raw).replace("\r", "")

    def send(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, text: str, count: int = 1) -> None:
        """Wait until a text was shown so often."""
        self._wait(lambda: self.text.count(text) >= count, repr(text))

    def expect_prompt(self, count: int) -> None:
        """Wait until the line editor has asked for the message of this number: then it takes pastes."""
        self._wait(lambda: self.raw.count("\x1b[?2004h") >= count, f"prompt {count}")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        try:
            wait_until(lambda: condition() or self.process.poll() is not None, what)
        except TimeoutError as error:
            raise AssertionError(f"{what} is not in:\n{self.text}") from error
        self._reader.join(0 if self.process.poll() is None else PATIENCE)
        assert condition(), f"it ended without {what}:\n{self.text}"

    def end(self) -> int:
        """Wait until the process has ended by itself, and return its exit code."""
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the other side is closed
                return
            if not data:
                return
            self.raw += data.decode(errors="replace")
