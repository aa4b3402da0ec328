"""The gRPC server's life. It shares the gate with the HTTP door: draining, health and limits hold for both."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from weft.config import Config
from weft.frontend.gate import Gate
from weft.frontend.rpc.addresses import add_socket, add_tcp
from weft.frontend.rpc.inference import SERVICE_NAME, Inference
from weft.frontend.rpc.keys import KeyCheck
from weft.frontend.rpc.probes import Probes

SERVICES = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)


class RpcServer:
    """The open door."""

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


async def serve_rpc(gate: Gate, config: Config) -> RpcServer:
    """Open the door, on the running event loop. Raises ConfigError when it cannot be where it is told to be."""
    options = config.grpc
    server = grpc.aio.server(interceptors=[KeyCheck(gate)], options=_channel_options(config))
    inference, probes = Inference(gate, options), Probes(gate)
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
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ]
