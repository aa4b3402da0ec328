"""The addresses that a server listens on, and why one cannot be had."""

from __future__ import annotations

import errno
import socket

from weft.errors import ConfigError


class PortTaken(ConfigError):
    """Another program listens on the port."""


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Return a socket that is bound to the address. Raises ConfigError with the one reason why it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error.strerror}.") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"Port {port} on {host} is in use.",
                hint=f"Stop the other program, or choose another port with {flag} (0: any free one).",
            ) from error
        raise ConfigError(
            f"Cannot listen on {host}, port {port}: {error.strerror}.", hint=f"Set --host or {flag}."
        ) from error
    return listener
