"""A server's life: bind, start, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from weft import logs
from weft.api.app import admission_app, compat_apis
from weft.api.background import BackgroundWork
from weft.api.http_protocol import protocol_factory
from weft.api.listening import bind
from weft.api.middleware import allowed_origins, is_loopback
from weft.backends.contract import ConfiguredModels
from weft.errors import ConfigError, EngineFault, WeftError
from weft.options import Config, ServerOptions
from weft.serving.admission import Admission
from weft.serving.auth import POLL_S, Keys, file_state
from weft.serving.model_pool import StartEngine

if TYPE_CHECKING:
    from weft.api.grpc.grpc_server import RpcServer

log = logging.getLogger(__name__)

StartAdmission = Callable[[Admission], Coroutine[Any, Any, None]]

SHUTDOWN_TIMEOUT_S = 2
"""How long aborted requests have to tell their clients so, and connections to close."""
IDLE_CONNECTION_S = 75
"""Seconds for which a connection without a request is kept: longer than clients and load balancers keep it (httpx 5,
aiohttp 15, most proxies 60 s). A request that is sent while the server closes its connection is lost."""

NO_ENGINE = "The engine died too often and was given up; the server ends."
NO_ENGINE_HINT = "The log says of what. --keep-serving-without-engine makes the server go on and try again."

MAX_FILES = 65536
"""Open at the same time, where the operating system lets the process have so many."""


def serve(engine_factory: StartEngine, config: Config) -> None:
    """Serve one model until a signal says stop. Raises ConfigError when the address cannot be had, what kept the
    engine from starting, and EngineFault when it has died for good."""

    async def start(admission: Admission) -> None:
        admission.open(await engine_factory(), engine_factory)

    _serve(start, config)


def serve_models(models: ConfiguredModels, config: Config) -> None:
    """Serve several models until a signal says stop. What keeps one of them from starting is no error here. Raises
    EngineFault when none can be served any more because their engines have died for good."""

    async def start(admission: Admission) -> None:
        await admission.pool.start()

    _serve(start, config, models)


def _serve(start: StartAdmission, config: Config, models: ConfiguredModels | None = None) -> None:
    logs.set_up(config.server.log_level, form=config.server.log_format)
    check_server(config)
    allow_many_connections()
    return_large_blocks()
    with bind(config.server.host, config.server.port) as listener:
        life = _Life(config, listener, models)
        with asyncio.Runner(loop_factory=life.loop_factory) as runner:
            runner.run(life.live(start))


def check_server(config: Config) -> None:
    """Raise ConfigError for settings with which no server starts, as far as they and the files of keys and certificates
    tell."""
    options = config.server
    check_reach(options)
    allowed_origins(options)
    compat_apis(options)
    Keys(options.api_key, options.api_key_file)
    Keys(options.admin_key, options.admin_key_file)
    if options.ssl_certfile or options.ssl_keyfile:
        Certificate(options)
    if config.grpc.grpc:
        from weft.api.grpc.grpc_server import tls_credentials

        tls_credentials(config.grpc)


def check_reach(options: ServerOptions) -> None:
    """Raise ConfigError for an address that others can reach, when no key is wanted."""
    if options.api_key or options.api_key_file or options.insecure or is_loopback(options.host):
        return
    raise ConfigError(
        f"--host {options.host} can be reached from other machines, and no API key is set.",
        hint="Set --api-key, --api-key-file or WEFT_API_KEY, or --insecure to serve without a key.",
    )


def allow_many_connections() -> None:
    """Ask for many open files: each connection is one, and shells allow a process only 1024 until it does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MAX_FILES:
        allowed = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


LARGE_BLOCK_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3


def return_large_blocks() -> None:
    """Let large blocks of memory go back to the system as soon as they are free. By default glibc keeps up to 64 MB for
    every thread, once such a block was freed in it."""
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such setting
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


class Certificate:
    """The server's certificate and key. A handshake gets what is in the files by then, looked at once a second at most;
    open connections keep what they have."""

    def __init__(self, options: ServerOptions, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the files. Raises ConfigError when they cannot be used."""
        if not options.ssl_certfile:
            raise ConfigError("--ssl-keyfile is set without --ssl-certfile.", hint="Set --ssl-certfile too.")
        self._options = options
        self._files = [Path(path) for path in (options.ssl_certfile, options.ssl_keyfile) if path]
        self._clock = clock
        self._next_look = 0.0
        self._seen = self._states()
        self._current = self.context = self._loaded()
        self.context.sni_callback = self._on_handshake

    def reload(self) -> None:
        """Read the files again. Raises ConfigError, and nothing has changed then."""
        self._seen = self._states()
        self._current = self._loaded()

    def _on_handshake(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        if self._clock() >= self._next_look:
            self._next_look = self._clock() + POLL_S
            if self._states() != self._seen:
                self.reload_or_log()
        connection.context = self._current

    def reload_or_log(self) -> None:
        try:
            self.reload()
        except ConfigError as error:
            log.error("the certificate stays as it was: %s", error)
        else:
            log.info("the certificate was read again")

    def _states(self) -> list[tuple[int, int, int] | None]:
        return [file_state(path) for path in self._files]

    def _loaded(self) -> ssl.SSLContext:
        for path in self._files:
            try:
                path.open("rb").close()
            except OSError as error:
                raise ConfigError(
                    f"{path}: {error.strerror}.", hint="It is named by --ssl-certfile or --ssl-keyfile."
                ) from error
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        wrong = "not a PEM file, or a part of it is missing"

        def password() -> str:
            """OpenSSL asks only for an encrypted key; without this it would ask at the terminal."""
            nonlocal wrong
            if not self._options.ssl_keyfile_password:
                raise ConfigError(f"{self._files[-1]} is encrypted.", hint="Set --ssl-keyfile-password.")
            wrong = "--ssl-keyfile-password is wrong"
            return self._options.ssl_keyfile_password

        try:
            context.load_cert_chain(self._files[0], self._files[-1], password=password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                wrong = "the key does not belong to the certificate"
            raise ConfigError(
                f"--ssl-certfile and --ssl-keyfile cannot be used ({', '.join(map(str, self._files))}): {wrong}.",
                hint="Both are PEM files: the certificate chain, and its private key.",
            ) from error
        return context


class HttpServer(uvicorn.Server):
    """The HTTP server leaves signals to `_Life`: uvicorn would close its sockets before the requests inside are done.
    It ends as soon as `end` is called, where uvicorn looks for that ten times a second and waits for a tenth more."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._end = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not self._end.is_set():
            await self.on_tick(0)  # the date of answers
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._end.wait(), timeout=1.0)

    def end(self) -> None:
        self.should_exit = True
        self._end.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for opened in (*self.servers, *(sockets or ())):
            opened.close()


class _Life:
    def __init__(self, config: Config, listener: socket.socket, models: ConfiguredModels | None) -> None:
        self._config = config
        self._listener = listener
        self._admission = Admission(config, models)
        self._background = BackgroundWork(self._admission)
        options = uvicorn.Config(
            admission_app(self._admission, self._background),
            http=protocol_factory(config),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
            timeout_keep_alive=IDLE_CONNECTION_S,
        )
        self._certificate: Certificate | None = None
        if config.server.ssl_certfile or config.server.ssl_keyfile:
            self._certificate = Certificate(config.server)
            options.load()
            options.ssl = self._certificate.context
        self.loop_factory = options.get_loop_factory()
        self._server = HttpServer(options)
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def live(self, start: StartAdmission) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        began = time.monotonic()
        rpc = await self._open_rpc()
        http = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        http.add_done_callback(lambda _: self._stop.set())
        try:
            if await self._start(start):
                await self._background.start()
                self._announce(time.monotonic() - began)
                if rpc is not None:
                    log.info("gRPC answers on port %d", rpc.port)
                with self._admission.watchdog:
                    is_lost = await self._until_end()
                    await self._drain(SHUTDOWN_TIMEOUT_S if is_lost else self._config.server.drain_timeout_s)
                if is_lost:
                    raise EngineFault(NO_ENGINE, hint=NO_ENGINE_HINT)
        finally:
            await self._background.stop()
            await self._admission.close()
            self._server.end()
            if rpc is not None:
                await rpc.stop(SHUTDOWN_TIMEOUT_S)
            await http
            if self._admission.traces is not None:
                await asyncio.to_thread(self._admission.traces.close)

    async def _open_rpc(self) -> RpcServer | None:
        if not self._config.grpc.grpc:
            return None
        from weft.api.grpc.grpc_server import serve_rpc

        return await serve_rpc(self._admission, self._config)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    def _reload(self) -> None:
        for keys in (self._admission.keys, self._admission.admin_keys):
            try:
                log.info("keys were read again: %d", keys.reload())
            except ConfigError as error:
                log.error("the keys stay as they were: %s", error)
        if self._certificate is not None:
            self._certificate.reload_or_log()
        if self._admission.pool.has_many:
            try:
                self._admission.pool.reload()
            except ConfigError as error:
                log.error("the models stay as they were: %s", error)

    async def _start(self, start: StartAdmission) -> bool:
        """Start what is served; false when a signal to stop came first."""
        starting = asyncio.create_task(start(self._admission))
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            if starting.cancelled():
                return False
        try:
            starting.result()
        except WeftError:
            raise
        except Exception as error:
            log.exception("the engine did not start")
            raise EngineFault(f"The engine did not start: {type(error).__name__}: {error}.") from error
        return True

    def _announce(self, seconds: float) -> None:
        names = ", ".join(slot.name for slot in self._admission.pool.slots)
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if self._certificate is None else "https"
        sys.stdout.write(f"Weft serves {names} at {scheme}://{shown}:{port} (ready in {seconds:.1f} s)\n")
        sys.stdout.flush()
        # What is there by now stays to the end: looking for garbage in it would only make streams stutter.
        gc.collect()
        gc.freeze()

    async def _until_end(self) -> bool:
        """Wait for a signal to stop, or until no model can be served any more: then return True."""
        stop = asyncio.create_task(self._stop.wait())
        lost = asyncio.create_task(self._admission.pool.lost.wait())
        await asyncio.wait({stop, lost}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        lost.cancel()
        return not self._stop.is_set()

    async def _drain(self, seconds: float) -> None:
        """Let the requests inside finish, for a while; then end them."""
        self._admission.drain()
        await self._background.batches.stop()
        log.info("draining: running requests have %g s", seconds)
        done = asyncio.create_task(self._admission.empty())
        now = asyncio.create_task(self._stop_now.wait())
        await asyncio.wait({done, now}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        now.cancel()
        self._admission.abort()
        await asyncio.wait({done}, timeout=SHUTDOWN_TIMEOUT_S)
        done.cancel()
