"""HTTP as bytes, for what no client library would send."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

from tests.waiting import PATIENCE

JSON = "Content-Type: application/json\r\n"

SILENCE_S = 0.5
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
    """All that the server says to these bytes until it closes, or says no more after so many answers. The connection
    stays open on this side: a client that has gone would not be answered."""
    received = b""
    with connect(url) as connection:
        connection.sendall(request)
        try:
            while data := connection.recv(1 << 20):
                received += data
                if received.count(b"HTTP/1.1 ") >= num_answers:
                    connection.settimeout(SILENCE_S)
        except (TimeoutError, ConnectionResetError):
            return received
    return received


def status_of(answer: bytes) -> int:
    """The status of the first answer; 0 when the connection was closed without one."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
