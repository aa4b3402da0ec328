"""The connection between an edge and a replica: TCP, TLS where certificates are given, a proof on both sides that they
know the cluster's key, and then the typed frames of `weft.engine.wire`.

The proof is HMAC-SHA256 over a nonce of each side, in messages of a fixed size. Nothing else is read, and no frame is
decoded, before it was checked.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Struct

from weft.cluster.router import ReplicaLoad
from weft.engine.wire import (
    Abort,
    ControlCall,
    Done,
    FrameReader,
    Heartbeat,
    PrefixDigests,
    Started,
    Submit,
    Vocabulary,
    decoded,
    write_frame,
)
from weft.engine_stats import EngineStats
from weft.errors import ConfigError
from weft.options import ClusterOptions
from weft.types import Event, ImageModelInfo, ModelInfo, Request

MAGIC = b"weft-cluster-1\n\0"
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_HANDSHAKE_BYTES = 256
"""An unauthenticated connection that sends more is closed."""
HANDSHAKE_SECONDS = 10.0
MIN_KEY_CHARS = 32
MAX_KEY_BYTES = 4096


class Hello(Struct, frozen=True, tag=True):
    """The first message of an edge."""

    edge: str
    """A name for the replica's log."""


class Drain(Struct, frozen=True, tag=True):
    """The message that a replica must take no new requests, and end when it has none."""


class ReplicaStatus(Struct, frozen=True, tag=True):
    """The status tells how a replica stands. It is sent when that changes, and every second as a heartbeat."""

    state: str
    """ready, restarting (its engine is being replaced: requests wait) or draining (none are taken)."""
    stats: EngineStats
    waiting_tokens: int = 0
    image_slots: int = 0
    """Images that its engine generates at the same time."""
    adapters: list[str] = []
    """The adapters that its engine was asked for last."""


def load_tokens(request: Request, images: ImageModelInfo | None) -> int:
    """Return the tokens of load that a request counts as: those of its prompt, or the cost of an image's steps."""
    if request.image is None or images is None:
        return request.num_prompt_tokens
    return images.num_tokens * request.image.passes_per_step * request.image.steps


def load_of(replica: str, status: ReplicaStatus, *, is_draining: bool = False) -> ReplicaLoad:
    """Return what a replica's status tells the router."""
    stats = status.stats
    return ReplicaLoad(
        replica,
        waiting=stats.waiting,
        waiting_tokens=status.waiting_tokens,
        running=stats.running,
        kv_usage=stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0,
        image_slots_free=max(0, status.image_slots - stats.images_running - stats.images_waiting),
        draining=is_draining or status.state == "draining",
        adapters=tuple(status.adapters),
    )


class ReplicaReady(Struct, frozen=True, tag=True):
    """A replica's answer to Hello."""

    boot: str
    """A random name of the replica's process: its counters go on while this is the same."""
    model: ModelInfo
    status: ReplicaStatus


class StepTokens(Struct, frozen=True, tag=True):
    """The message holds what one or more steps brought to the requests of one edge."""

    tokens: dict[str, int]
    """The token of every request that got one token and nothing else, by request id."""
    events: list[Event]


class NotTaken(Struct, frozen=True, tag=True):
    """The message that a replica does not take a request now, though another may: its queue is full, or it drains."""

    request_id: str
    reason: str


ToReplica = Hello | Submit | Abort | Vocabulary | ControlCall | Drain | Heartbeat
FromReplica = ReplicaReady | ReplicaStatus | StepTokens | Started | NotTaken | Done | PrefixDigests
_to_replica: msgspec.msgpack.Decoder[ToReplica] = msgspec.msgpack.Decoder(ToReplica)
_from_replica: msgspec.msgpack.Decoder[FromReplica] = msgspec.msgpack.Decoder(FromReplica)


class NotAuthenticated(Exception):
    """The other side did not prove that it knows the cluster's key."""


def read_key(options: ClusterOptions) -> bytes:
    """Return the cluster's key. Raises ConfigError, which never repeats it."""
    path = options.cluster_key_file
    if not path:
        raise ConfigError(
            "Edges and replicas know each other by a key: --cluster-key-file is not set.",
            hint="Make one: openssl rand -hex 32 > cluster.key",
        )
    try:
        with Path(path).expanduser().open("rb") as file:
            key = file.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"--cluster-key-file {path}: {error.strerror}.") from error
    if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_BYTES:
        raise ConfigError(
            f"--cluster-key-file {path}: a key has {MIN_KEY_CHARS} to {MAX_KEY_BYTES} characters.",
            hint="Make one: openssl rand -hex 32 > cluster.key",
        )
    return key


def tls_context(options: ClusterOptions, *, is_server: bool) -> ssl.SSLContext | None:
    """Return the context of TLS in which both sides show a certificate of the cluster's authority; None without.
    Addresses of replicas come and go, so that certificates are not compared with them. Raises ConfigError."""
    files = (options.cluster_tls_cert, options.cluster_tls_key, options.cluster_tls_ca)
    if not any(files):
        return None
    if not all(files):
        raise ConfigError(
            "TLS between edges and replicas needs --cluster-tls-cert, --cluster-tls-key and --cluster-tls-ca."
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(files[0], files[1], password=lambda: "")
        context.load_verify_locations(files[2])
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"The certificates of --cluster-tls-cert, -key and -ca cannot be used: {error}.") from error
    return context


class Link(FrameReader):
    """One end of a connection. It reads no more than a handshake before it is authenticated."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False
        """True while the other side does not read what was written."""
        self.on_resume: Callable[[], None] | None = None
        self._is_authenticated = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_authenticated and len(self._received) > MAX_HANDSHAKE_BYTES:
            self._received.clear()
            self.abort()

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        if self.on_resume is not None:
            self.on_resume()

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def send(self, message: Struct) -> None:
        """Send a message, unless the other side is gone and that is noticed in a moment."""
        if not self._transport.is_closing():
            write_frame(self._transport, message)

    def send_frame(self, encoded: bytes) -> None:
        """Send a frame that was encoded for several."""
        if not self._transport.is_closing():
            self._transport.write(encoded)

    def close(self) -> None:
        """End the connection when all that was written is sent."""
        self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        self._transport.abort()

    # The handshake.

    async def prove_to_edge(self, key: bytes) -> None:
        """Authenticate an edge and this replica to each other, on the replica's side. Raises NotAuthenticated."""
        ours = secrets.token_bytes(NONCE_BYTES)
        self._transport.write(MAGIC + ours)
        said = await self._exactly(len(MAGIC) + NONCE_BYTES + PROOF_BYTES)
        theirs, proof = said[len(MAGIC) : -PROOF_BYTES], said[-PROOF_BYTES:]
        if not hmac.compare_digest(_proof(key, b"edge", ours, theirs), proof):
            raise NotAuthenticated("it does not know the cluster's key")
        self._transport.write(_proof(key, b"replica", ours, theirs))
        self._authenticated()

    async def prove_to_replica(self, key: bytes) -> None:
        """Authenticate a replica and this edge to each other, on the edge's side. Raises NotAuthenticated."""
        said = await self._exactly(len(MAGIC) + NONCE_BYTES)
        if not said.startswith(MAGIC):
            raise NotAuthenticated("it is no replica of this version of Weft")
        theirs, ours = said[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
        self._transport.write(MAGIC + ours + _proof(key, b"edge", theirs, ours))
        if not hmac.compare_digest(_proof(key, b"replica", theirs, ours), await self._exactly(PROOF_BYTES)):
            raise NotAuthenticated("it does not know the cluster's key")
        self._authenticated()

    def _authenticated(self) -> None:
        if self._received:
            raise NotAuthenticated("it sent more than a proof")
        self._is_authenticated = True

    async def _exactly(self, count: int) -> bytes:
        while len(self._received) < count:
            if self._ended:
                raise NotAuthenticated("it ended the connection before it had proved anything")
            await self._more()
        read = bytes(self._received[:count])
        del self._received[:count]
        return read

    # Messages. The other end is authenticated.

    async def follow_edge(self, take: Callable[[ToReplica], None]) -> None:
        """Give every message of an edge to `take` as it arrives, until it is gone. Raises BrokenFrame."""
        await self.follow(lambda body: take(decoded(_to_replica, body)))

    async def read_from_replica(self) -> FromReplica | None:
        """Wait for the next message of a replica; None when it is gone. Raises BrokenFrame."""
        body = await self.body()
        return None if body is None else decoded(_from_replica, body)

    async def follow_replica(self, take: Callable[[FromReplica], None]) -> None:
        """Give every message of a replica to `take` as it arrives, until it is gone. Raises BrokenFrame."""
        await self.follow(lambda body: take(decoded(_from_replica, body)))


def _proof(key: bytes, who: bytes, replica_nonce: bytes, edge_nonce: bytes) -> bytes:
    """Return a side's proof. The two sides' differ, so that none can be sent back as the other's."""
    return hmac.digest(key, MAGIC + who + b"\0" + replica_nonce + edge_nonce, "sha256")


async def connect(host: str, port: int, key: bytes, tls: ssl.SSLContext | None) -> Link:
    """Connect an edge to a replica. Raises OSError, TimeoutError and NotAuthenticated."""
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        options: dict[str, Any] = {} if tls is None else {"ssl": tls, "server_hostname": ""}
        _, link = await asyncio.get_running_loop().create_connection(Link, host, port, **options)
        try:
            await link.prove_to_replica(key)
            link.send(Hello(f"{os.uname().nodename}:{os.getpid()}"[:200]))
        except BaseException:
            link.abort()
            raise
    return link
