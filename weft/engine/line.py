"""The engine's end of the socket: one thread reads it, any thread may write to it, and it beats by itself."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time

from weft.engine.wire import Beat, BrokenFrame, FromEngine, ToEngine, frame, receive

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0


class Line:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self.inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        """What came; None when nothing will come any more."""
        self.closed = threading.Event()
        self.step_began = 0.0
        """When the step under way began (monotonic); 0 between steps."""
        for work in (self._read_forever, self._beat_forever):
            threading.Thread(target=work, name="weft-engine-line", daemon=True).start()

    def send(self, message: FromEngine) -> None:
        try:
            with self._lock:
                self._sock.sendall(frame(message))
        except OSError:
            self.closed.set()

    def close(self) -> None:
        self.closed.set()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("The socket was closed already: %s", error)

    def _read_forever(self) -> None:
        try:
            while (message := receive(self._sock)) is not None:
                self.inbox.put(message)
        except BrokenFrame as error:
            log.error("The api process sent what is no message: %s", error)
        self.closed.set()
        self.inbox.put(None)

    def _beat_forever(self) -> None:
        while not self.closed.wait(BEAT_SECONDS):
            began = self.step_began
            self.send(Beat(time.monotonic() - began if began else 0.0))
