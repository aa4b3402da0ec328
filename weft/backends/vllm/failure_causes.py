"""The causes of vLLM's failures. Its engine computes in other processes, whose errors do not reach the caller; but each
of them logs its error before it ends. So they log through a handler of ours, which writes the error down by its type,
where this process can read it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec
from msgspec import Struct

from weft.errors import ModelError, OutOfMemory, WeftError
from weft.logs import LogFormat
from weft.machine.memory import as_out_of_memory

MEMORY_CHECKS = {
    ("vllm.v1.core.kv_cache_utils", "_check_enough_kv_cache_memory"),
    ("vllm.v1.worker.utils", "request_memory"),
    ("vllm.v1.worker.cpu_worker", "__init__"),
    ("vllm.v1.worker.cpu_worker", "determine_available_memory"),
}
"""Where vLLM raises a plain ValueError, and means that the memory does not suffice."""


class FailureCause(Struct, frozen=True, kw_only=True):
    message: str
    is_out_of_memory: bool = False
    at: float = 0.0
    """The time on the clock that all processes share, time.monotonic's."""


class FailureCauses(logging.Handler):
    """A log handler that writes the logged errors to a file, one a line."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = Path(path)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(cause_of(error)) + b"\n")
        except OSError:
            self.handleError(record)


def logging_config(level: str, form: LogFormat, causes: Path) -> str:
    """Return the file that VLLM_LOGGING_CONFIG_PATH names: vLLM logs as Weft does, and below warnings only to debug."""
    formatter = "weft.logs.JsonFormatter" if form == "json" else "weft.logs.LineFormatter"
    shown = {"class": "logging.StreamHandler", "formatter": "weft", "stream": "ext://sys.stderr"}
    return json.dumps(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"weft": {"()": formatter}},
            "handlers": {"shown": shown, "causes": {"()": f"{__name__}.{FailureCauses.__name__}", "path": str(causes)}},
            "loggers": {
                "vllm": {
                    "handlers": ["shown", "causes"],
                    "level": "DEBUG" if level == "debug" else "WARNING",
                    "propagate": False,
                }
            },
        }
    )


def noted(path: Path, since: float = 0.0) -> list[FailureCause]:
    """Return the causes since that time, in the order in which they were logged."""
    if not path.exists():
        return []
    causes = [msgspec.json.decode(line, type=FailureCause) for line in path.read_bytes().splitlines()]
    return [cause for cause in causes if cause.at >= since]


def load_failure(error: BaseException, causes: list[FailureCause]) -> WeftError:
    """Return the error for an engine that did not start. The first cause is the reason for those after it."""
    own = cause_of(error)
    short = next((cause for cause in (*causes, own) if cause.is_out_of_memory), None)
    if short is not None:
        return OutOfMemory(
            f"vLLM has not the memory for this model: {short.message}",
            hint="Set less: --gpu-memory-utilization, --max-model-len, --max-num-seqs, --max-num-batched-tokens.",
        )
    return ModelError(
        f"vLLM cannot load this model: {(causes[0] if causes else own).message}",
        hint="The log tells where. Another engine may load it: --engine native.",
    )


def cause_of(error: BaseException) -> FailureCause:
    links = list(_chain(error))
    return FailureCause(
        message=f"{type(error).__name__}: {_in_one_line(error)}",
        is_out_of_memory=any(as_out_of_memory(link) is not None or _is_memory_check(link) for link in links),
        at=time.monotonic(),
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_memory_check(error: BaseException) -> bool:
    trace: TracebackType | None = error.__traceback__
    if not isinstance(error, ValueError) or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    frame = trace.tb_frame
    return (frame.f_globals.get("__name__"), frame.f_code.co_name) in MEMORY_CHECKS


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or "no message"
