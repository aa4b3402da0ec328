"""HTTP as bytes, for what no client library would send."""

from __future__ import annotations

import json
import re
import socket
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from tests.waiting import PATIENCE

JSON = "Content-Type: application/json\r\n"

SILENCE_S = 0.2
"""How long a server is listened to after its answers, for one that it should not give."""


def connect(url: str, receive_buffer: int = 0) -> socket.socket:
    address = urlsplit(url)
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(PATIENCE)
    connection.connect((address.hostname, address.port))
    return connection


def post_bytes(path: str, body: dict[str, Any], headers: str = "") -> bytes:
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{JSON}{headers}Content-Length: {len(payload)}\r\n\r\n"
    return head.encode() + payload


def everything(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    return b"".join(iter(lambda: connection.recv(1 << 20), b""))


def exchange(url: str, request: bytes, num_answers: int = 1) -> bytes:
    """All that the server says to these bytes until it closes, or for a while after so many answers. The connection
    stays open on this side: a client that has gone would not be answered."""
    received = b""
    deadline: float | None = None
    with connect(url) as connection, suppress(TimeoutError, ConnectionResetError):
        connection.sendall(request)
        while data := connection.recv(1 << 20):
            received += data
            if deadline is None and _has_answers(received, num_answers, has_body=not request.startswith(b"HEAD ")):
                deadline = time.monotonic() + SILENCE_S
            if deadline is not None:
                # A stream without an end, as that of the live view, would never be silent.
                connection.settimeout(max(0.001, deadline - time.monotonic()))
    return received


def _has_answers(received: bytes, count: int, has_body: bool) -> bool:
    """Return whether so many answers came, the last one with its body, or with the head of a stream."""
    _, *answers = received.split(b"HTTP/1.1 ")
    if len(answers) < count:
        return False
    head, end, body = answers[-1].partition(b"\r\n\r\n")
    length = re.search(rb"^content-length: (\d+)", head, re.IGNORECASE | re.MULTILINE)
    return bool(end) and (not has_body or length is None or len(body) >= int(length[1]))


def status_of(answer: bytes) -> int:
    """The status of the first answer; 0 when the connection was closed without one."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
