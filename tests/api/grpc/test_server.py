"""The gRPC server itself: where it listens, who may call it, what probes see, how it closes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
import subprocess
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import DESCRIPTOR as HEALTH_DESCRIPTOR
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest
from grpc_reflection.v1alpha import reflection_pb2_grpc
from grpc_reflection.v1alpha.reflection_pb2 import DESCRIPTOR as REFLECTION_DESCRIPTOR
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from tests.api.grpc.calls import Client, answer_to, ask, check_whole, failed, refused, served
from tests.api.scripted_engine import ScriptedEngine, answer, forever, next_turn
from tests.waiting import PATIENCE, until
from weft.api.grpc import grpc_server, status
from weft.api.grpc.ai_service_pb2 import DESCRIPTOR
from weft.api.grpc.grpc_server import SERVICES, serve_rpc
from weft.backends.contract import Health
from weft.config import load
from weft.errors import ConfigError, ModelError
from weft.options import Config
from weft.serving.admission import Admission
from weft.types import Output

Code = grpc.StatusCode
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
KEYS = {"api_key": ["first-key", "second-key"]}


async def open_and_close(**settings: Any) -> None:
    config = load({"grpc_port": 0, **settings}, env={})
    server = await serve_rpc(Admission(config), config)
    await server.stop(0)


def refused_settings(**settings: Any) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        asyncio.run(open_and_close(**settings))
    return refused.value


# Keys.


def all_methods() -> list[Any]:
    services = [
        service
        for file in (DESCRIPTOR, HEALTH_DESCRIPTOR, REFLECTION_DESCRIPTOR)
        for service in file.services_by_name.values()
    ]
    assert {service.full_name for service in services} == set(SERVICES)
    return [method for service in services for method in service.methods]


def call_raw(channel: grpc.aio.Channel, method: str, client_streams: bool, server_streams: bool, **options: Any) -> Any:
    kind = f"{'stream' if client_streams else 'unary'}_{'stream' if server_streams else 'unary'}"
    return getattr(channel, kind)(method)([] if client_streams else b"", **options)


def test_without_a_key_every_method_is_closed_but_the_probe() -> None:
    async def scenario() -> None:
        async with served(**KEYS) as opened:
            closed = set()
            for method in all_methods():
                path = f"/{method.containing_service.full_name}/{method.name}"
                call = call_raw(opened.channel, path, method.client_streaming, method.server_streaming)
                if path == "/grpc.health.v1.Health/Check":
                    assert HealthCheckResponse.FromString(await call).status == SERVING
                else:
                    assert (await refused(call))[0] is Code.UNAUTHENTICATED, path
                    closed.add(path)
            assert len(closed) == 7
            for unknown in ("/cy.llm.AiInference/Nothing", "/nobody.Knows/It", "/grpc.health.v1.Health/check"):
                assert (await refused(call_raw(opened.channel, unknown, False, False)))[0] is Code.UNAUTHENTICATED

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("metadata", "lets_in"),
    [
        ([("authorization", "Bearer first-key")], True),
        ([("authorization", "bearer second-key")], True),
        ([("x-api-key", "second-key")], True),
        ([("x-api-key", "wrong"), ("authorization", "Bearer first-key")], True),
        ([], False),
        ([("authorization", "first-key")], False),
        ([("authorization", "Bearer ")], False),
        ([("authorization", "Bearer wrong")], False),
        ([("authorization", "Bearer first-key,second-key")], False),
        ([("authorization", "Basic first-key")], False),
        ([("x-api-key", "")], False),
        ([("x-api-key", "first-ke")], False),
        ([("x-api-key-bin", b"first-key")], False),
    ],
)
def test_a_key_lets_in(metadata: list[tuple[str, Any]], lets_in: bool) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        async with served(engine, **KEYS) as opened:
            call = opened.channel.stream_stream("/cy.llm.AiInference/StreamPredict")(
                [ask().SerializeToString()], metadata=metadata
            )
            if lets_in:
                assert [message async for message in call]
            else:
                code, details = await refused(call)
                assert code is Code.UNAUTHENTICATED
                assert "first-key" not in details
            assert len(engine.submitted) == lets_in

    asyncio.run(scenario())


def test_a_refusal_does_not_wait_for_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "HEARING_S", 0.1)

    async def scenario() -> None:
        async with served(**KEYS) as opened:
            assert (await asyncio.wait_for(refused(opened.predict()), PATIENCE))[0] is Code.UNAUTHENTICATED

    asyncio.run(scenario())


@pytest.mark.parametrize("key", ["", " ", "key "])
def test_a_key_that_would_let_in_by_accident_is_refused(key: str) -> None:
    assert "API key" in refused_settings(api_key=["good", key]).message


def test_a_key_comes_from_every_place(tmp_path: Path) -> None:
    file = tmp_path / "weft.toml"
    file.write_text('[server]\napi_key = ["a", "b"]\n')
    assert load(file=file, env={}).server.api_key == ["a", "b"]
    assert load(env={"WEFT_API_KEY": "a,b"}).server.api_key == ["a", "b"]
    assert load({"api_key": ["c"]}, env={"WEFT_API_KEY": "a,b"}).server.api_key == ["c"]
    assert load(env={}).server.api_key == []


# Where it is.


def test_a_port_that_is_taken_is_explained() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        error = refused_settings(grpc_port=taken.getsockname()[1])
    assert "--grpc-port" in error.hint


def test_the_reason_is_the_one_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "is in use" in refused_settings(grpc_port=taken.getsockname()[1]).message
    assert "not an address of this machine" in refused_settings(host="not.a.host.invalid").message


def test_a_second_server_has_another_port_unless_one_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        usual = taken.getsockname()[1]
        monkeypatch.setattr("weft.api.grpc.grpc_server.USUAL_PORT", usual)

        async def scenario() -> None:
            async with served(grpc_port=-1) as opened:
                assert opened.server.port != usual
                check_whole(await answer_to(opened, ask()))

        asyncio.run(scenario())
        assert f"Port {usual} is in use" in caplog.text
    assert asyncio.run(port_of(grpc_port=-1)) == usual, "the usual one, when it is free"


async def port_of(**settings: Any) -> int:
    async with served(**settings) as opened:
        return opened.server.port


def test_two_servers_do_not_share_a_port() -> None:
    async def scenario() -> None:
        async with served() as opened:
            with pytest.raises(ConfigError):
                await open_and_close(grpc_port=opened.server.port)

    asyncio.run(scenario())


def test_it_listens_on_this_machine_only() -> None:
    async def scenario() -> None:
        async with served() as opened:
            tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
            sockets = [line.split() for table in tables for line in table.splitlines()]
            places = [place for _, place, _, state, *_ in sockets if state == "0A"]
            own = [place for place in places if place.endswith(f":{opened.server.port:04X}")]
            # 127.0.0.1, and nothing else; gRPC writes it as an IPv6 address where it can.
            assert len(own) == 1 and own[0].partition(":")[0].endswith("0100007F")

    asyncio.run(scenario())


def test_a_unix_socket_is_for_its_owner_alone_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "weft.sock"

    async def scenario() -> None:
        async with served(grpc_socket=str(path)) as opened:
            assert stat.filemode(path.stat().st_mode) == "srw-------"
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                check_whole(await answer_to(Client(channel), ask()))
            check_whole(await answer_to(opened, ask()))
            with pytest.raises(ConfigError, match="Another server"):
                await open_and_close(grpc_socket=str(path))
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                check_whole(await answer_to(Client(channel), ask()))
        assert not path.exists()

    asyncio.run(scenario())


def test_a_unix_socket_wants_the_key_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            served(grpc_socket=str(tmp_path / "s"), **KEYS),
            grpc.aio.insecure_channel(f"unix:{tmp_path / 's'}") as channel,
        ):
            assert (await refused(Client(channel).predict([ask()])))[0] is Code.UNAUTHENTICATED
            check_whole(await answer_to(Client(channel, "first-key"), ask()))

    asyncio.run(scenario())


def test_a_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "weft.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.is_socket()
    asyncio.run(open_and_close(grpc_socket=str(path)))


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "precious"
    file.write_text("data")
    assert "no socket" in refused_settings(grpc_socket=str(file)).message
    link = tmp_path / "link"
    link.symlink_to(file)
    assert "no socket" in refused_settings(grpc_socket=str(link)).message
    assert file.read_text() == "data"
    assert "cannot be used" in refused_settings(grpc_socket=str(tmp_path / "no" / "s")).message


def test_a_folder_that_others_write_in_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert "Others may write" in refused_settings(grpc_socket=str(tmp_path / "s")).message
    tmp_path.chmod(0o1777)
    asyncio.run(open_and_close(grpc_socket=str(tmp_path / "s")))
    tmp_path.chmod(0o700)


# TLS.


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority (ca), a server's certificate and a client's, and one of a stranger."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    for name in ("ca", "stranger"):
        openssl("req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    for name in ("server", "client"):
        openssl("req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}",
                "-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=DNS:localhost",
                "-addext", "basicConstraints=critical,CA:FALSE")  # fmt: skip
    return folder


def tls_settings(folder: Path, *, client_ca: bool = False) -> dict[str, Any]:
    settings = {"grpc_tls_cert": str(folder / "server.pem"), "grpc_tls_key": str(folder / "server.key")}
    return settings | ({"grpc_tls_client_ca": str(folder / "ca.pem")} if client_ca else {})


def tls_channel(folder: Path, port: int, *, own: str = "", authority: str = "ca") -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(
        (folder / f"{authority}.pem").read_bytes(),
        (folder / f"{own}.key").read_bytes() if own else None,
        (folder / f"{own}.pem").read_bytes() if own else None,
    )
    return grpc.aio.secure_channel(f"localhost:{port}", credentials)


def test_tls(tls: Path) -> None:
    async def scenario() -> None:
        async with served(**tls_settings(tls)) as opened:
            async with tls_channel(tls, opened.server.port) as channel:
                check_whole(await answer_to(Client(channel), ask()))
            async with tls_channel(tls, opened.server.port, authority="stranger") as channel:
                assert (await refused(Client(channel).predict([ask()])))[0] is Code.UNAVAILABLE
            # Without TLS nothing is answered.
            assert (await refused(opened.predict([ask()])))[0] is Code.UNAVAILABLE

    asyncio.run(scenario())


def test_tls_with_client_certificates(tls: Path) -> None:
    async def scenario() -> None:
        async with served(**tls_settings(tls, client_ca=True)) as opened:
            async with tls_channel(tls, opened.server.port, own="client") as channel:
                check_whole(await answer_to(Client(channel), ask()))
            for own in ("", "stranger"):
                async with tls_channel(tls, opened.server.port, own=own) as channel:
                    assert (await refused(Client(channel).predict([ask()])))[0] is Code.UNAVAILABLE

    asyncio.run(scenario())


def test_tls_that_is_half_told_is_refused(tls: Path) -> None:
    settings = tls_settings(tls, client_ca=True)
    for missing in ("grpc_tls_cert", "grpc_tls_key"):
        assert "certificate and its key" in refused_settings(**settings | {missing: ""}).message
    assert "No such file" in refused_settings(**settings | {"grpc_tls_key": "/nowhere"}).message
    error = refused_settings(**settings | {"grpc_tls_key": str(tls / "server.pem")})
    assert "--grpc-tls-cert" in error.hint


# Limits.


def test_a_message_that_is_too_large_is_refused_and_the_server_goes_on() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        async with served(engine, grpc_max_message_mb=1) as opened:
            assert (await refused(opened.predict([ask("x" * (1 << 20))])))[0] is Code.RESOURCE_EXHAUSTED
            assert not engine.submitted
            check_whole(await answer_to(opened, ask("x" * 1000_000)))

    asyncio.run(scenario())


def test_a_message_of_a_hundred_megabytes_comes_in_where_the_flag_says_so() -> None:
    async def scenario() -> None:
        async with served(grpc_max_message_mb=100) as opened:
            assert (await opened.control("ping", payload={"x": "y" * 100_000_000})).payload["message"] == "pong"

    asyncio.run(scenario())


def test_a_stream_too_many_is_refused_and_probes_are_not() -> None:
    async def scenario() -> None:
        async with served(grpc_max_streams=2) as opened:
            calls = [opened.predict() for _ in range(2)]
            for call in calls:
                await call.write(ask())
                assert await call.read()
            code, details = await refused(opened.predict([ask()]))
            assert code is Code.RESOURCE_EXHAUSTED and "--grpc-max-streams" in details
            assert await check(opened.channel) == SERVING
            await calls[0].done_writing()
            while await calls[0].read() != grpc.aio.EOF:
                pass
            check_whole(await answer_to(opened, ask()))

    asyncio.run(scenario())


def test_a_hundred_connections_at_once() -> None:
    async def scenario() -> None:
        async with served(ScriptedEngine([next_turn, *answer("Hel", "lo")])) as opened:

            async def one(number: int) -> None:
                options = [("grpc.use_local_subchannel_pool", 1)]
                async with grpc.aio.insecure_channel(f"127.0.0.1:{opened.server.port}", options) as channel:
                    responses = await answer_to(Client(channel), ask(trace_id=str(number)))
                    check_whole(responses)
                    assert responses[0].trace_id == str(number)

            await asyncio.gather(*map(one, range(100)))

    asyncio.run(scenario())


# Keepalive. A forwarder between a real client and the server reads the frames of HTTP/2 that pass.

PREFACE_BYTES, PING, GOAWAY, ACK = 24, 6, 7, 1
"""Of HTTP/2: the length of the text that a client begins with, two types of frames, and a flag."""


class PingedServer:
    def __init__(self) -> None:
        self.num_connections = 0
        self.num_answered = 0
        """Pings of the client that the server answered."""
        self.goaways: list[bytes] = []
        """What the server said as it ended connections."""

    async def forward(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection. A client that was sent away connects again, perhaps as the test ends."""
        self.num_connections += 1
        opened = [writer]
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
            opened.append(to_server)
            await self._forward(reader, writer, from_server, to_server)
        finally:
            for one in opened:
                one.close()
            await asyncio.gather(*(one.wait_closed() for one in opened), return_exceptions=True)

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        from_server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> None:

        async def to_client() -> None:
            while header := await from_server.read(9):
                header += await from_server.readexactly(9 - len(header))
                payload = await from_server.readexactly(int.from_bytes(header[:3]))
                self.num_answered += header[3] == PING and header[4] & ACK
                if header[3] == GOAWAY:
                    self.goaways.append(payload)
                writer.write(header + payload)
            writer.close()

        async def to_the_server() -> None:
            while data := await reader.read(1 << 16):
                to_server.write(data)
            to_server.close()

        await asyncio.gather(to_client(), to_the_server())


@contextlib.asynccontextmanager
async def pinged() -> AsyncIterator[PingedServer]:
    """A server, and a client that pings it every second, the most often that gRPC does, and without a call."""
    seen = PingedServer()
    async with served() as opened:
        forwarder = await asyncio.start_server(partial(seen.forward, opened.server.port), "127.0.0.1", 0)
        address = "{}:{}".format(*forwarder.sockets[0].getsockname())
        options = [
            ("grpc.keepalive_time_ms", 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        async with forwarder, grpc.aio.insecure_channel(address, options) as channel:
            assert await check(channel) == SERVING
            yield seen


def test_a_client_may_ping_without_calls_as_often_as_the_interval_allows_and_not_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two servers at the same time: one whose interval allows it, and one that disconnects."""

    def quick(config: Config) -> list[tuple[str, int]]:
        return [(name, 100 if "min_ping_interval" in name else value) for name, value in usual(config)]

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            with monkeypatch.context() as patch:
                patch.setattr(grpc_server, "_channel_options", quick)
                allowing = await stack.enter_async_context(pinged())
            usually = await stack.enter_async_context(pinged())
            await until(lambda: usually.goaways, "a GOAWAY")
            assert b"too_many_pings" in usually.goaways[0]
            await until(lambda: allowing.num_answered >= 5 or allowing.goaways, "five pings")
            assert not allowing.goaways and allowing.num_connections == 1

    usual = grpc_server._channel_options
    asyncio.run(scenario())


# Control and health.


def test_control() -> None:
    async def scenario() -> None:
        async with served() as opened:
            ping = await opened.control("ping", trace_id="t")
            assert (ping.trace_id, ping.command, dict(ping.payload)) == (
                "t", "ping_response", {"status": "ok", "message": "pong"},
            )  # fmt: skip
            models = await opened.control("list_models")
            assert models.trace_id
            assert dict(models.payload) == {"status": "ok", "models": "scripted", "loaded": "scripted"}
            for command in ("unload_model", "reload_registry", "explode", ""):
                answered = await opened.control(command, payload={"model_id": "scripted"})
                assert answered.command == f"{command}_response"
                assert answered.payload["status"] == "error" and answered.payload["message"]
            # Refused is refused: the model is still there.
            check_whole(await answer_to(opened, ask()))

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["", "default", "scripted"])
def test_control_unloads_and_loads_the_only_model(name: str) -> None:
    async def scenario() -> None:
        engines: list[ScriptedEngine] = []

        async def start() -> ScriptedEngine:
            engines.append(ScriptedEngine())
            return engines[-1]

        async with served(opened=False, admin_key=["root"]) as opened:
            opened.admission.open(await start(), start)
            operator, payload = Client(opened.channel, "root"), {"model_id": name} if name else {}
            for command in ("load_model", "unload_model", "reload", "reload_registry"):
                refused = await opened.control(command, payload=payload)
                assert refused.payload["status"] == "error" and "--admin-key" in refused.payload["message"]
            gone = await operator.control("unload_model", payload=payload)
            assert dict(gone.payload) == {"status": "ok", "state": "unloaded"}
            assert engines[0].closed
            assert dict((await opened.control("list_models")).payload)["loaded"] == ""
            assert (await opened.health()).healthy, "the next request is answered"
            check_whole(await answer_to(opened, ask()))
            assert len(engines) == 2
            await operator.control("unload_model", payload=payload)
            back = await operator.control("load_model", payload=payload)
            assert dict(back.payload) == {"status": "ok", "state": "loaded"} and len(engines) == 3
            for number, command in enumerate(("reload", "reload_registry"), 4):
                assert (await operator.control(command, payload=payload)).payload["state"] == "loaded"
                assert len(engines) == number and engines[-2].closed and not engines[-1].closed
            other = await operator.control("unload_model", payload={"model_id": "other"})
            assert other.payload["status"] == "error" and "no model 'other'" in other.payload["message"]
            await opened.admission.close()

    asyncio.run(scenario())


def test_a_load_that_fails_is_told_and_can_be_tried_again() -> None:
    async def scenario() -> None:
        faults: list[Exception] = []

        async def start() -> ScriptedEngine:
            if faults:
                raise faults.pop()
            return ScriptedEngine()

        async with served(opened=False, admin_key=["root"]) as opened:
            opened.admission.open(await start(), start)
            operator = Client(opened.channel, "root")
            faults.append(ModelError("It is damaged."))
            failed_load = await operator.control("reload")
            assert failed_load.payload["status"] == "error" and "It is damaged." in failed_load.payload["message"]
            assert not (await opened.health()).healthy
            assert (await operator.control("load_model")).payload["state"] == "loaded"
            assert (await opened.health()).healthy
            await opened.admission.close()

    asyncio.run(scenario())


def test_control_repeats_little_of_what_it_was_sent() -> None:
    async def scenario() -> None:
        async with served() as opened:
            answered = await opened.control("x" * 1_000_000)
            assert answered.payload["status"] == "error" and len(answered.SerializeToString()) < 1000
            with pytest.raises(grpc.aio.AioRpcError, match="1000000 characters; at most 256"):
                await opened.control("ping", trace_id="x" * 1_000_000)

    asyncio.run(scenario())


def test_control_before_the_model_is_there() -> None:
    async def scenario() -> None:
        async with served(opened=False) as opened:
            assert (await opened.control("ping")).payload["status"] == "ok"
            assert (await opened.control("list_models")).payload["status"] == "error"

    asyncio.run(scenario())


async def check(channel: grpc.aio.Channel, service: str = "") -> int:
    status: int = (await health_pb2_grpc.HealthStub(channel).Check(HealthCheckRequest(service=service))).status
    return status


def test_health_is_the_truth_of_the_moment() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine([Output(text="a", token_ids=[1]), forever])
        async with served(opened=False) as opened:

            async def seen() -> tuple[bool, str, int, int, int]:
                told = await opened.health()
                probed = [await check(opened.channel, name) for name in ("", "cy.llm.AiInference", "live")]
                return (told.healthy, told.metrics["state"], *probed)

            assert await seen() == (False, "starting", NOT_SERVING, NOT_SERVING, SERVING)
            opened.admission.open(engine)
            assert await seen() == (True, "ready", SERVING, SERVING, SERVING)
            engine.state = Health(False, "restarting")
            assert await seen() == (False, "restarting", NOT_SERVING, NOT_SERVING, SERVING)
            engine.state = Health(True)
            before = (await opened.health()).metrics
            call = opened.predict([ask()])
            await call.read()
            during = (await opened.health()).metrics
            assert int(during["requests_running"]) == int(before["requests_running"]) + 1
            assert int(during["requests_inflight"]) == int(before["requests_inflight"]) + 1
            opened.admission.drain()
            assert await seen() == (False, "draining", NOT_SERVING, NOT_SERVING, SERVING)
            assert (await refused(health_pb2_grpc.HealthStub(opened.channel).Check(HealthCheckRequest(service="x"))))[
                0
            ] is Code.NOT_FOUND

    asyncio.run(scenario())


def test_watch_tells_of_every_change_and_ends_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "POLL_S", 0.05)

    async def scenario() -> None:
        engine = ScriptedEngine()
        async with served(engine) as opened:
            stub = health_pb2_grpc.HealthStub(opened.channel)
            listed = await stub.List(HealthListRequest())
            assert {name: told.status for name, told in listed.statuses.items()} == dict.fromkeys(
                ("", "cy.llm.AiInference", "live"), SERVING
            )
            watch = stub.Watch(HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            engine.state = Health(False, "restarting")
            assert (await watch.read()).status == NOT_SERVING
            engine.state = Health(True)
            assert (await watch.read()).status == SERVING
            unknown = await stub.Watch(HealthCheckRequest(service="x")).read()
            assert unknown.status == HealthCheckResponse.SERVICE_UNKNOWN
            await asyncio.wait_for(opened.server.stop(3600), PATIENCE)
            assert await watch.read() == grpc.aio.EOF

    asyncio.run(scenario())


def test_reflection_lists_the_services_and_their_messages() -> None:
    async def scenario() -> None:
        async with served() as opened:
            stub = reflection_pb2_grpc.ServerReflectionStub(opened.channel)
            asked = [
                ServerReflectionRequest(list_services=""),
                ServerReflectionRequest(file_containing_symbol="cy.llm.AiInference"),
            ]
            listed, file = [response async for response in stub.ServerReflectionInfo(iter(asked))]
            assert {service.name for service in listed.list_services_response.service} == set(SERVICES)
            assert file.file_descriptor_response.file_descriptor_proto[0] == DESCRIPTOR.serialized_pb

    asyncio.run(scenario())


# The end.


def test_it_closes_at_once_when_streams_only_wait() -> None:
    async def scenario() -> None:
        async with served() as opened:
            call = opened.predict()
            await call.write(ask())
            while not (await call.read()).end_of_stream:
                pass
            await asyncio.wait_for(opened.server.stop(3600), PATIENCE)
            _, code, details = await failed(call)
            assert (code, details) == (Code.UNAVAILABLE, "The server is shutting down.")

    asyncio.run(scenario())


def test_it_waits_for_answers_as_long_as_the_grace() -> None:
    async def scenario() -> None:
        ended = asyncio.Event()
        engine = ScriptedEngine([Output(text="a", token_ids=[1]), ended.wait, *answer("b")])
        async with served(engine) as opened:
            running = asyncio.create_task(answer_to(opened, ask()))
            await until(lambda: bool(engine.open))
            stopping = asyncio.create_task(opened.server.stop(3600))
            code, details = await refused(opened.predict([ask()]))
            # The last is what grpc.aio's client says of itself when the connection closes while it sends.
            assert code in (Code.UNAVAILABLE, Code.CANCELLED) or details == "Internal error from Core"
            assert not stopping.done()
            ended.set()
            await stopping
            check_whole(await running)

        engine = ScriptedEngine([Output(text="a", token_ids=[1]), forever])
        async with served(engine) as opened:
            call = opened.predict([ask()])
            await call.read()
            await asyncio.wait_for(opened.server.stop(0.1), PATIENCE)
            _, code, _ = await failed(call)
            assert code in (Code.UNAVAILABLE, Code.CANCELLED)
            await until(lambda: not engine.open)

    asyncio.run(scenario())
