"""An engine process that leaves a process of its own behind, which waits, and tells the ids of that
one and of its parent, the fork server."""

from __future__ import annotations

import os
import signal
import socket
import sys


def main() -> None:
    left = os.fork()
    if left == 0:
        signal.pause()
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        sock.sendall(f"{left} {os.getppid()}".encode())
    os._exit(0)
