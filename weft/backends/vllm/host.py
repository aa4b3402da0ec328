"""The process with vLLM in it: `python -m weft.backends.vllm.host ORDERS FD`.

To the api process it is an engine process like Weft's own: the same messages, the same supervision, as disposable.
vLLM's own processes are in its group, and the group ends when the api process is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec
import uvloop
from pydantic import ValidationError

from weft import logs
from weft.backends.vllm.arguments import DriverOptions, VllmKind, arguments_of
from weft.backends.vllm.failure_causes import FailureCause, load_failure, logging_config, noted
from weft.backends.vllm.open_requests import OpenRequests
from weft.backends.vllm.stats import VllmStats, memory_reader, model_info
from weft.backends.vllm.vllm_process import end_group
from weft.engine.wire import (
    HEARTBEAT_SECONDS,
    Abort,
    ControlCall,
    Done,
    Failed,
    Heartbeat,
    Ready,
    Shutdown,
    Start,
    Submit,
    frame,
    receive,
    receive_from,
)
from weft.errors import ConfigError, EngineFault, OutOfMemory, WeftError
from weft.machine.hardware import MemoryGauge, inspect_machine, oom_kills
from weft.machine.planner import plan_load
from weft.options import Config
from weft.types import ReadBlocks, Request, ResetPrefixCache, StartProfile, StopProfile

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 1.0
"""Time for an orderly end, once the api process is gone."""


class Driver(Protocol):
    """One of vLLM's two engines, loaded."""

    def failure(self) -> BaseException | None:
        """Return the error of a vLLM that has died without being asked anything."""

    def submit(self, requests: Iterable[Request]) -> None: ...

    def abort(self, request_ids: Iterable[str]) -> None: ...

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; return False where vLLM cannot, while requests are in it."""

    def close(self) -> None: ...


async def serve(sock: socket.socket, options: DriverOptions, start: Start) -> int:
    """Serve one api process, and return the exit code."""
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    try:
        await _serve(reader, writer, options, start)
        return 0
    except WeftError as error:
        writer.write(frame(Failed(type(error).__name__, error.message, error.hint)))
    except Exception as error:  # noqa: BLE001 - the api process is told of every error
        log.error("vLLM failed:\n%s", traceback.format_exc())
        writer.write(frame(Failed(type(error).__name__, str(error))))
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    return 1


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, options: DriverOptions, start: Start
) -> None:
    began, causes = time.monotonic(), Path(options.folder) / "causes.jsonl"
    _import_vllm(start.config, options, causes)
    plan = plan_load(start.config, start.files, inspect_machine(), engine=options.kind.name)
    arguments = arguments_of(start.config, start.files, options.kind)
    stats = VllmStats(MemoryGauge(memory_reader(options.kind.device)))
    open_requests = OpenRequests(writer, stats, arguments["max_num_seqs"])
    vllm_config = _configured(arguments, options.kind)
    driver = _load(vllm_config, stats, open_requests, options.kind, causes)
    name, seconds = arguments["served_model_name"], time.monotonic() - began
    info = model_info(name, vllm_config, options.kind.device, plan, seconds)
    open_requests.send(Ready(info, stats.stats(0)))
    listening = asyncio.create_task(_listen(reader, driver, open_requests))
    heartbeats = asyncio.create_task(_send_heartbeats(driver, open_requests))
    ends: set[asyncio.Future[Any]] = {listening, open_requests.death}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    heartbeats.cancel()
    if open_requests.death.done():
        raise _death_of(open_requests.death.result(), noted(causes, open_requests.last_news))
    listening.result()
    driver.close()


def _death_of(error: BaseException, causes: list[FailureCause]) -> EngineFault:
    """Return the error for a vLLM that died: its own says only that there was one."""
    log.error("vLLM died.", exc_info=error)
    return EngineFault(f"vLLM died of {causes[0].message}" if causes else f"vLLM died: {error}")


def _import_vllm(config: Config, options: DriverOptions, causes: Path) -> None:
    """Import vLLM with the environment that it needs. What the operator has set there is kept."""
    kind, logging_file = options.kind, Path(options.folder) / "logging.json"
    logging_file.write_text(logging_config(config.server.log_level, config.server.log_format, causes))
    for name, value in {
        "VLLM_LOGGING_CONFIG_PATH": str(logging_file),
        "VLLM_NO_USAGE_STATS": "1",
        # The synchronous engine computes in this process, whose errors have types; the asynchronous one never does.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if kind.synchronous else "1",
        # As `vllm serve` has it: this process has threads and a running event loop, which a fork would copy.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }.items():
        os.environ.setdefault(name, value)
    try:
        from vllm.platforms import current_platform
    except Exception as error:
        raise ConfigError(
            f"vLLM is installed, but cannot be imported: {type(error).__name__}: {error}", hint=f"Try: {kind.install}"
        ) from error
    if current_platform.device_type != kind.device:
        raise ConfigError(
            f"{kind.name} needs a vLLM for {kind.device}; the one that is installed runs on "
            f"{current_platform.device_type or 'nothing that it finds here'}.",
            hint=f"Try: {kind.install}, or another --engine.",
        )


def _configured(arguments: dict[str, Any], kind: VllmKind) -> Any:
    """Return vLLM's configuration: it reads the model's own, and checks one against the other."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        return EngineArgs(**arguments).create_engine_config()
    except ValidationError as error:
        said = "; ".join(fault["msg"] for fault in error.errors())
        raise ConfigError(f"{kind.name} cannot be started so: {said}") from error
    except Exception as error:
        raise ConfigError(f"{kind.name} cannot be started so: {type(error).__name__}: {error}") from error


def _load(vllm_config: Any, stats: VllmStats, open_requests: OpenRequests, kind: VllmKind, causes: Path) -> Driver:
    kills = oom_kills()
    try:
        if kind.synchronous:
            from weft.backends.vllm.sync_driver import SyncDriver

            return SyncDriver(vllm_config, stats, open_requests)
        from weft.backends.vllm.async_driver import AsyncDriver

        return AsyncDriver(vllm_config, stats, open_requests)
    except Exception as error:
        log.error("vLLM did not start:\n%s", traceback.format_exc())
        if oom_kills() > kills:
            raise OutOfMemory("The kernel ended one of vLLM's processes for want of memory while it loaded.") from error
        raise load_failure(error, noted(causes)) from error


async def _listen(reader: asyncio.StreamReader, driver: Driver, open_requests: OpenRequests) -> None:
    while (message := await receive_from(reader)) is not None:
        match message:
            case Submit(requests=requests):
                open_requests.accept(requests)
                driver.submit(requests)
            case Abort(request_ids=request_ids):
                driver.abort(request_ids)
                open_requests.close(request_ids)
            case Shutdown():
                return
            case ControlCall():
                open_requests.send(await _carry_out(message, driver))
            case _:
                raise EngineFault(f"vLLM was sent a message that is not for it: {type(message).__name__}.")


async def _carry_out(call: ControlCall, driver: Driver) -> Done:
    match call.message:
        case ResetPrefixCache():
            if await driver.reset_prefix_cache():
                return Done(call.number, "0")
            return Done(call.number, error="vLLM forgets prompts only while no request is in it.")
        case StartProfile() | StopProfile():
            return Done(call.number, error="vLLM's steps are not recorded: it has a profiler of its own.")
        case ReadBlocks():
            return Done(call.number, error="vLLM does not tell which blocks are in use.")


async def _send_heartbeats(driver: Driver, open_requests: OpenRequests) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        if (failure := driver.failure()) is not None:
            open_requests.died(failure)
        open_requests.send(Heartbeat(open_requests.silence_seconds))


def _end_with(sock: socket.socket, folder: str) -> None:
    """End vLLM's processes and this one when the other end of the socket is gone, whatever they are doing."""
    hangup = select.poll()
    hangup.register(sock, 0)
    hangup.poll()
    time.sleep(SHUTDOWN_SECONDS)
    _end(folder, 1)


def _end(folder: str, code: int) -> NoReturn:
    """End the process at once: vLLM leaves processes, threads and devices that an orderly end would wait for."""
    end_group(os.getpgrp(), spare=os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    logging.shutdown()
    os._exit(code)


def _let_go(sock: socket.socket) -> None:
    """Close the socket in a fork of this process, which would hold it open when this one has ended."""
    if sock.fileno() >= 0:
        os.close(sock.detach())


def main() -> None:
    options = msgspec.json.decode(sys.argv[1], type=DriverOptions)
    sock = socket.socket(fileno=int(sys.argv[2]))
    os.register_at_fork(after_in_child=partial(_let_go, sock))
    threading.Thread(target=_end_with, args=(sock, options.folder), name="weft-vllm-watch", daemon=True).start()
    logs.set_up("info")
    start = receive(sock)
    code = 0
    if isinstance(start, Start):
        logs.set_up(start.config.server.log_level, form=start.config.server.log_format)
        code = uvloop.run(serve(sock, options, start))
    _end(options.folder, code)


if __name__ == "__main__":
    main()
