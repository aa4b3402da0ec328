"""The gRPC server's life. It shares the admission with HTTP: draining, health and limits hold for both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1.health_pb2 import (  # type: ignore[attr-defined]
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListResponse,
)
from grpc_reflection.v1alpha import reflection

from weft import logs
from weft.api.grpc.inference import SERVICE_NAME, Inference
from weft.api.grpc.status import RpcStatus, refuse
from weft.api.listening import PortTaken, bind
from weft.errors import ConfigError
from weft.observe import traces
from weft.observe.watchdog import name_task
from weft.options import Config, GrpcOptions
from weft.serving.admission import Admission
from weft.serving.auth import HOW, presented

log = logging.getLogger(__name__)

USUAL_PORT = 50051
ANY_IF_TAKEN = -1
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def add_tcp(server: grpc.aio.Server, host: str, options: GrpcOptions) -> int:
    """Listen on the port, and return which it is. Raises ConfigError with the reason why it cannot be had."""
    credentials = tls_credentials(options)
    port = _checked_port(host, options.grpc_port)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        # The port was free a moment ago.
        raise ConfigError(
            f"Cannot listen for gRPC on {address}: the certificate and its key do not fit."
            if credentials is not None
            else f"Cannot listen for gRPC on {address}: another program was quicker.",
            hint="Set --grpc-tls-cert and --grpc-tls-key." if credentials is not None else "Try again.",
        ) from error


def _checked_port(host: str, port: int) -> int:
    """Return the port to listen on: the one that was asked for, or where none was asked for the usual one, or any free
    one while another program has that. Raises ConfigError."""
    try:
        bind(host, USUAL_PORT if port == ANY_IF_TAKEN else port, "--grpc-port").close()
    except PortTaken:
        if port != ANY_IF_TAKEN:
            raise
        log.warning("Port %d is in use: gRPC answers on another one (--grpc-port).", USUAL_PORT)
        return 0
    return USUAL_PORT if port == ANY_IF_TAKEN else port


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


def tls_credentials(options: GrpcOptions) -> grpc.ServerCredentials | None:
    """Read the files for TLS; None: none are named. Raises ConfigError."""
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


OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check"})
"""Probes have no key, and learn nothing but whether the server is well."""

CONTROL = "/cy.llm.AiInference/Control"
"""Admin keys open it as well: what it may be told to do depends on the key."""

NO_KEY = RpcStatus(grpc.StatusCode.UNAUTHENTICATED, f"This server wants an API key: {HOW}.")


class KeyCheck(grpc.aio.ServerInterceptor):
    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        # Whatever kind of method was called: this kind can end a call that sends nothing.
        self._refusal: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        metadata = handler_call_details.invocation_metadata
        traces.take_in(metadata)
        name_task(handler_call_details.method)
        if handler_call_details.method in OPEN_METHODS or not self._admission.keys.required:
            return await continuation(handler_call_details)
        shown = [*presented(metadata)]
        owner = self._admission.keys.owner(shown)
        if owner is None and handler_call_details.method == CONTROL:
            owner = self._admission.admin_keys.owner(shown)
        if owner is None:
            return self._refusal
        # The call goes on in this task, and is the key's owner's.
        logs.tenant.set(owner)
        return await continuation(handler_call_details)


async def _refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await refuse(context, NO_KEY)


READY = ("", SERVICE_NAME)
"""The names under which the server is well while it takes predictions."""

LIVE = "live"
"""The name under which a server that only starts or drains is well too: it must not be killed for that."""

POLL_S = 0.5

Context = grpc.aio.ServicerContext[HealthCheckRequest, HealthCheckResponse]


class Probes(health_pb2_grpc.HealthServicer):
    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End the calls that watch."""
        self._closing.set()

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        status = self._status(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"There is no service {request.service!r:.200} here.")
        return HealthCheckResponse(status=status)

    async def Watch(self, request: HealthCheckRequest, context: Context) -> None:
        told = None
        while not self._closing.is_set():
            status = self._status(request.service)
            if status != told:
                told = status
                await context.write(HealthCheckResponse(status=status))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._closing.wait()

    async def List(self, _: object, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return HealthListResponse(
            statuses={name: HealthCheckResponse(status=self._status(name)) for name in (*READY, LIVE)}
        )

    def _status(self, service: str) -> int:
        if service == LIVE:
            return HealthCheckResponse.SERVING
        if service not in READY:
            return HealthCheckResponse.SERVICE_UNKNOWN
        return HealthCheckResponse.SERVING if self._admission.health().ready else HealthCheckResponse.NOT_SERVING


SERVICES = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)


class RpcServer:
    """The gRPC server that listens."""

    def __init__(self, server: grpc.aio.Server, inference: Inference, probes: Probes, port: int) -> None:
        self.port = port
        self._server = server
        self._inference = inference
        self._probes = probes

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, let those that answer go on for as long as the grace, and end them."""
        self._inference.close()
        self._probes.close()
        await self._server.stop(grace_s)


async def serve_rpc(admission: Admission, config: Config) -> RpcServer:
    """Listen on the running event loop. Raises ConfigError when the address cannot be had."""
    options = config.grpc
    server = grpc.aio.server(interceptors=[KeyCheck(admission)], options=_channel_options(config))
    inference, probes = Inference(admission, options), Probes(admission)
    server.add_generic_rpc_handlers([inference.handler()])
    health_pb2_grpc.add_HealthServicer_to_server(probes, server)
    reflection.enable_server_reflection(SERVICES, server)
    port = add_tcp(server, config.server.host, options)
    if options.grpc_socket:
        add_socket(server, Path(options.grpc_socket))
    await server.start()
    return RpcServer(server, inference, probes, port)


def _channel_options(config: Config) -> list[tuple[str, int]]:
    metadata_bytes = config.limits.max_header_kb << 10
    return [
        # Two servers would share a port, and its calls, without a word.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.grpc.grpc_max_message_mb << 20),
        # A call with more is ended by gRPC itself, with RESOURCE_EXHAUSTED.
        ("grpc.max_metadata_size", metadata_bytes),
        ("grpc.absolute_max_metadata_size", metadata_bytes),
        # A client that went away without a word is noticed, and clients may ask whether the server is still there.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]
