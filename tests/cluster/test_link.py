"""The connection between edge and replica: who gets in, and what hostile bytes cost."""

from __future__ import annotations

import asyncio
import functools
import itertools
import secrets
import socket
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import ParamSpec

import pytest

from tests.engine.stand_in import MODEL, StandIn, StandIns
from tests.engine.test_client import FILES
from tests.waiting import PATIENCE, until
from weft.cluster import replica_link, replica_server
from weft.cluster.replica_link import (
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    Hello,
    Link,
    NotAuthenticated,
    ReplicaReady,
    StepTokens,
    connect,
    read_key,
    tls_context,
)
from weft.cluster.replica_server import MAX_UNAUTHENTICATED, ReplicaServer
from weft.engine.client import EngineClient, engine_config
from weft.engine.wire import MAX_FRAME_BYTES, Abort, StepOutput, Submit, ToEngine, frame
from weft.engine_stats import EngineStats
from weft.errors import ConfigError
from weft.options import ClusterOptions, Config, EngineOptions
from weft.types import Event, FinishReason, Request, SamplingParams

KEY = b"k" * 32
P = ParamSpec("P")


def on_a_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def whole() -> None:
            await test(*args, **kwargs)

        asyncio.run(whole())

    return run


class Served:
    """A replica server over a stand-in for an engine."""

    def __init__(self, server: ReplicaServer, engines: StandIns) -> None:
        self.server = server
        self.engines = engines
        self.links: list[Link] = []

    @property
    def engine(self) -> StandIn:
        return self.engines.launched[-1]

    async def sent(self) -> ToEngine:
        """The next message to the engine."""
        return await asyncio.to_thread(self.engine.inbox.get, timeout=PATIENCE)

    async def submitted(self) -> Request:
        """The next request that the engine is sent."""
        while not isinstance(message := await self.sent(), Submit):
            pass
        (request,) = message.requests
        return request

    async def edge(self, key: bytes = KEY) -> Link:
        link = await connect("127.0.0.1", self.server.port, key, None)
        self.links.append(link)
        assert isinstance(await link.read_from_replica(), ReplicaReady)
        return link

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port))


@asynccontextmanager
async def served(
    tls: ssl.SSLContext | None = None, heartbeat_timeout_s: float = PATIENCE, key: bytes = KEY
) -> AsyncIterator[Served]:
    engines = StandIns()
    client = EngineClient(Config(engine=EngineOptions(heartbeat_timeout_s=PATIENCE)), FILES, engines)
    await client.start()
    # The stand-in has no heartbeat, and may be silent for longer than edges.
    client.config = Config(engine=EngineOptions(heartbeat_timeout_s=heartbeat_timeout_s))
    server = ReplicaServer(client, key, tls)
    await server.listen("127.0.0.1", 0)
    replica = Served(server, engines)
    try:
        yield replica
    finally:
        for link in replica.links:
            link.abort()
        await server.close()


def request(name: str, **changes: object) -> Request:
    params = SamplingParams(seed=1, max_tokens=8)
    return Request(request_id=name, prompt_token_ids=[1, 2, 3], params=params, **changes)  # type: ignore[arg-type]


async def read_tokens(link: Link) -> StepTokens:
    while True:
        message = await link.read_from_replica()
        assert message is not None
        if isinstance(message, StepTokens):
            return message


@on_a_loop
async def test_edges_get_their_own_tokens_alone() -> None:
    """Request ids of several edges may be equal."""
    async with served() as replica:
        one, other = await replica.edge(), await replica.edge()
        one.send(Submit([request("same"), request("second", sibling_of="same")]))
        other.send(Submit([request("same")]))
        sent = [(await replica.submitted()) for _ in range(3)]
        ids = [each.request_id for each in sent]
        assert len({*ids}) == 3
        assert next(each for each in sent if each.sibling_of).sibling_of in ids
        of_one = [name for name in ids if name.startswith(ids[0].partition(".")[0] + ".")]
        tokens = dict(zip(ids, (7, 8, 9), strict=True))
        replica.engine.send(StepOutput(tokens, [], EngineStats()))
        told = {**(await read_tokens(one)).tokens, "other": (await read_tokens(other)).tokens}
        assert set(told) == {"same", "second", "other"} and len(of_one) in (1, 2)
        assert sorted([told["same"], told["second"], *told["other"].values()]) == [7, 8, 9]
        assert list(told["other"]) == ["same"]


@on_a_loop
async def test_a_step_is_one_frame_for_an_edge() -> None:
    async with served() as replica:
        edge = await replica.edge()
        edge.send(Submit([request(f"r{number}") for number in range(10)]))
        ids = [(await replica.submitted()).request_id for _ in range(10)]
        events = [
            Event(request_id=ids[9], token_ids=[5], cached_tokens=0),
            Event(request_id=ids[8], token_ids=[6], finish=FinishReason.LENGTH),
        ]
        replica.engine.send(StepOutput(dict.fromkeys(ids[:8], 4), events, EngineStats()))
        told = await read_tokens(edge)
        assert told.tokens == {f"r{number}": 4 for number in range(8)}
        assert [(event.request_id, event.token_ids) for event in told.events] == [("r9", [5]), ("r8", [6])]


@on_a_loop
async def test_an_edge_that_leaves_has_its_requests_aborted() -> None:
    async with served() as replica:
        edge = await replica.edge()
        edge.send(Submit([request("a"), request("b")]))
        ids = {(await replica.submitted()).request_id for _ in range(2)}
        edge.abort()
        aborted = [await replica.sent(), await replica.sent()]
        assert {name for message in aborted if isinstance(message, Abort) for name in message.request_ids} == ids
        assert replica.server.num_open == 0


@on_a_loop
async def test_an_edge_that_does_not_read_is_disconnected() -> None:
    async with served(heartbeat_timeout_s=1.0) as replica:
        edge = await replica.edge()
        edge._transport.pause_reading()
        edge.send(Submit([request("a")]))
        name = (await replica.submitted()).request_id
        (there,) = replica.server._edges
        for step in itertools.count(1):
            if there.link.is_paused:
                break
            preview = Event(request_id=name, denoise_step=step, image=bytes(1 << 20))
            await asyncio.to_thread(replica.engine.send, StepOutput({}, [preview], EngineStats()))
        await until(lambda: replica.server.num_edges == 0, "the edge's end")
        assert replica.server.num_open == 0


@on_a_loop
async def test_a_silent_edge_is_disconnected() -> None:
    """An edge whose machine is gone closes nothing."""
    async with served(heartbeat_timeout_s=1.0) as replica:
        edge = await replica.edge()
        edge.send(Submit([request("a")]))
        await replica.submitted()
        await until(lambda: replica.server.num_edges == 0, "the edge's end")
        assert replica.server.num_open == 0


@on_a_loop
async def test_another_key_is_refused_on_both_sides() -> None:
    async with served() as replica:
        with pytest.raises(NotAuthenticated):
            await connect("127.0.0.1", replica.server.port, b"x" * 32, None)
        assert replica.server.num_edges == 0
        # A replica that does not know the key cannot pretend to: the edge checks its proof.
        liar = await asyncio.start_server(_lie, "127.0.0.1", 0)
        async with liar:
            with pytest.raises(NotAuthenticated):
                await connect("127.0.0.1", liar.sockets[0].getsockname()[1], KEY, None)


async def _lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(MAGIC + secrets.token_bytes(NONCE_BYTES))
    said = await reader.readexactly(len(MAGIC) + NONCE_BYTES + PROOF_BYTES)
    writer.write(said[-PROOF_BYTES:])  # the edge's own proof, sent back
    await writer.drain()
    writer.close()


HOSTILE = {
    "nothing": b"",
    "random": secrets.token_bytes(100),
    "a frame": frame(Hello("me")),
    "a large length": struct.pack("<I", MAX_FRAME_BYTES - 1),
    "much": bytes(1 << 20),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 9,
    "a wrong proof": MAGIC + bytes(NONCE_BYTES + PROOF_BYTES),
    "a wrong proof, and a frame": MAGIC + bytes(NONCE_BYTES + PROOF_BYTES) + frame(Hello("me")),
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
@on_a_loop
async def test_hostile_bytes_get_nobody_in(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as replica:
        with replica.raw() as sock, monkeypatch.context() as brief:
            brief.setattr(replica_server, "HANDSHAKE_SECONDS", 0.2)
            with suppress(ConnectionError):
                await asyncio.to_thread(sock.sendall, sent)
            # It ends the connection by itself, after the handshake's time at most, and has said no more than its nonce.
            assert len(await asyncio.to_thread(_read_all, sock)) <= len(MAGIC) + NONCE_BYTES
        assert replica.server.num_edges == 0
        await (await replica.edge()).body()  # the status that comes as a heartbeat: others are served


def _read_all(sock: socket.socket) -> bytes:
    read = b""
    with suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            read += data
    return read


@on_a_loop
async def test_connections_that_prove_nothing_are_bounded() -> None:
    """Half-open ones keep no edge out: the oldest makes room."""
    async with served() as replica:
        socks = [await asyncio.to_thread(replica.raw) for _ in range(3 * MAX_UNAUTHENTICATED)]
        try:
            edge = await replica.edge()
            assert len(replica.server._pending) <= MAX_UNAUTHENTICATED
            assert len(await asyncio.to_thread(_read_all, socks[0])) <= len(MAGIC) + NONCE_BYTES
            edge.abort()
        finally:
            for sock in socks:
                sock.close()


@pytest.mark.parametrize(
    "sent",
    [b"\xff\xff\xff\xff", struct.pack("<I", 5) + b"hello", frame(Submit([request("x" * 1000)]))],
    ids=["too large", "no message", "a long id"],
)
@on_a_loop
async def test_an_edge_that_sends_no_message_is_disconnected(sent: bytes) -> None:
    async with served() as replica:
        edge = await replica.edge()
        edge.send_frame(sent)
        while await edge.body() is not None:
            pass
        assert replica.server.num_edges == 0 and replica.engine.inbox.empty()


def test_a_key_must_be_there_and_long(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("too short a secret")
    for path, said in (("", "is not set"), (str(tmp_path / "none"), "No such file"), (str(short), "32 to")):
        with pytest.raises(ConfigError, match=said) as raised:
            read_key(ClusterOptions(cluster_key_file=path))
        assert "too short a secret" not in str(raised.value)


def test_an_engine_is_told_nothing_of_the_cluster() -> None:
    options = ClusterOptions(cluster_key_file="cluster.key", replica_addresses=["10.0.0.7:9400"])
    assert engine_config(Config(cluster=options)).cluster == ClusterOptions()


# TLS.


def make_certificates(folder: Path) -> None:
    """An authority, a certificate of it, and one of another authority, by openssl."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ours", "others"):
        ca = (f"{name}-ca.pem", f"{name}-ca.key")
        openssl("req", "-x509", *ec, "-out", ca[0], "-keyout", ca[1], "-subj", f"/CN={name}", "-days", "2")
        openssl("req", *ec, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/CN=node")
        sign = ("-CA", ca[0], "-CAkey", ca[1], "-CAcreateserial", "-days", "2")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *sign)


def tls_options(folder: Path, name: str, ca: str) -> ClusterOptions:
    return ClusterOptions(
        cluster_tls_cert=str(folder / f"{name}.pem"),
        cluster_tls_key=str(folder / f"{name}.key"),
        cluster_tls_ca=str(folder / f"{ca}-ca.pem"),
    )


@on_a_loop
async def test_with_tls_both_sides_need_a_certificate_of_the_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificates(tmp_path)
    ours = tls_options(tmp_path, "ours", "ours")
    async with served(tls_context(ours, is_server=True)) as replica:
        port = replica.server.port
        link = await connect("127.0.0.1", port, KEY, tls_context(ours, is_server=False))
        ready = await link.read_from_replica()
        assert isinstance(ready, ReplicaReady) and ready.model == MODEL
        link.abort()
        for options in (tls_options(tmp_path, "ours", "others"), tls_options(tmp_path, "others", "ours")):
            with pytest.raises((OSError, NotAuthenticated)):
                await connect("127.0.0.1", port, KEY, tls_context(options, is_server=False))
        with pytest.raises((OSError, NotAuthenticated)), monkeypatch.context() as brief:
            brief.setattr(replica_link, "HANDSHAKE_SECONDS", 0.5)  # each side waits for the other
            await connect("127.0.0.1", port, KEY, None)
        with pytest.raises(ConfigError, match="needs"):
            tls_context(ClusterOptions(cluster_tls_cert="x"), is_server=True)
        with pytest.raises(ConfigError, match="cannot be used"):
            tls_context(tls_options(tmp_path, "none", "ours"), is_server=True)


def test_the_handshake_fits_its_bound() -> None:
    assert len(MAGIC) + NONCE_BYTES + PROOF_BYTES < replica_link.MAX_HANDSHAKE_BYTES
