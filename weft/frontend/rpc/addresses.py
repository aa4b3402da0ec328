"""Where the door is: a TCP port, with or without TLS, and a unix socket."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio

from weft.config import GrpcOptions
from weft.errors import ConfigError

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def add_tcp(server: grpc.aio.Server, host: str, options: GrpcOptions) -> int:
    """Listen on the port, and return which it is. Raises ConfigError when it cannot be had."""
    address = f"[{host}]:{options.grpc_port}" if ":" in host else f"{host}:{options.grpc_port}"
    credentials = _credentials(options)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        # gRPC tells the reason to standard error only.
        raise ConfigError(
            f"Cannot listen for gRPC on {address}: the port is taken, the address is not of this machine, or the "
            "certificate and its key do not fit.",
            hint="Set --grpc-port (0: any free one), --host or --grpc-tls-cert, or leave gRPC away with --no-grpc.",
        ) from error


def add_socket(server: grpc.aio.Server, path: Path) -> None:
    """Listen on a unix socket that only this user can open."""
    _make_way(path)
    try:
        with _private_files():
            server.add_insecure_port(f"unix:{path.absolute()}")
    except RuntimeError as error:
        raise ConfigError(f"Cannot listen for gRPC on {path}.", hint="Set --grpc-socket to a shorter path.") from error


def _make_way(path: Path) -> None:
    """Remove a socket that a server of this user left behind, and nothing else."""
    try:
        folder = path.absolute().parent.stat()
    except OSError as error:
        raise ConfigError(f"The folder of {path} cannot be used: {error.strerror}.", hint="Make it first.") from error
    if folder.st_mode & OTHERS_MAY_WRITE and not folder.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"Others may write in the folder of {path}, and could put a socket of theirs in its place.",
            hint="Set --grpc-socket to a folder of your own (chmod 700).",
        )
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(f"{path} is there already, and is no socket of yours.", hint="Set --grpc-socket.")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise ConfigError(f"Another server listens on {path}.", hint="Stop that one, or set --grpc-socket.")


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _credentials(options: GrpcOptions) -> grpc.ServerCredentials | None:
    certificate, key, client_ca = options.grpc_tls_cert, options.grpc_tls_key, options.grpc_tls_client_ca
    if not certificate and not key and not client_ca:
        return None
    if not certificate or not key:
        raise ConfigError(
            "TLS needs a certificate and its key.", hint="Set --grpc-tls-cert and --grpc-tls-key, both or neither."
        )
    return grpc.ssl_server_credentials(
        [(_read(key), _read(certificate))],
        root_certificates=_read(client_ca) if client_ca else None,
        require_client_auth=bool(client_ca),
    )


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}.", hint="It is needed for TLS.") from error
