"""An engine in a thread that speaks the real wire and does what a test tells it: no model, no scheduler."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable

from tests.waiting import PATIENCE
from weft.engine.wire import FromEngine, Ready, Shutdown, Start, ToEngine, frame, receive
from weft.types import ModelInfo

MODEL = ModelInfo(
    name="stand-in", max_model_len=4096, logits_width=256, num_blocks=100, block_size=16, device="cpu", dtype="float32"
)


class StandIn:
    """Ready at once. The test reads what it is sent from `inbox`, and sends what it likes."""

    def __init__(self, may_be_reaped: threading.Event | None = None) -> None:
        """With an event, it has ended for whoever waits for it when that is set."""
        self.pid: int | None = None
        self.socket, self._theirs = socket.socketpair()
        self.inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self.started_with: Start
        """The first message that came."""
        self._may_be_reaped = may_be_reaped
        self._thread = threading.Thread(target=self._read_forever, daemon=True)
        self._thread.start()

    def send(self, *messages: FromEngine) -> None:
        """All of them at once, as one piece of bytes."""
        self._theirs.sendall(b"".join(map(frame, messages)))

    def kill(self) -> None:
        self._theirs.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout_s: float) -> str | None:
        if self._may_be_reaped is not None:
            assert self._may_be_reaped.wait(PATIENCE)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        self._theirs.close()
        return "the stand-in ended"

    def _read_forever(self) -> None:
        while (message := receive(self._theirs)) is not None:
            if isinstance(message, Start):
                self.started_with = message
                # A test may kill it while it starts.
                with contextlib.suppress(BrokenPipeError):
                    self.send(Ready(MODEL))
                continue
            self.inbox.put(message)
            if isinstance(message, Shutdown):
                self.kill()


class StandIns:
    """Launches one after the other, and keeps them."""

    def __init__(self, make: Callable[[], StandIn] = StandIn) -> None:
        self._make = make
        self.launched: list[StandIn] = []

    def __call__(self) -> StandIn:
        self.launched.append(self._make())
        return self.launched[-1]
