"""Writes the log: one line for each event, with its request and tenant. Prompts are not logged unless asked for."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Literal, TextIO

request_id: ContextVar[str] = ContextVar("weft_request_id", default="")
"""The request that the running task serves; every line logged meanwhile carries it."""

tenant: ContextVar[str] = ContextVar("weft_tenant", default="")
"""The name of the API key of the request that the running task serves; empty where no key is required."""

LogFormat = Literal["text", "json"]

FOREIGN = ("uvicorn.error", "asyncio")
_FIELDS = "weft_fields"


def set_up(level: str, stream: TextIO | None = None, form: LogFormat = "text") -> None:
    """Send Weft's log, and the warnings of the libraries that it runs on, to one stream (standard error)."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if form == "json" else LineFormatter())
    weft = logging.getLogger("weft")
    weft.setLevel(level.upper())
    for logger in (weft, *map(logging.getLogger, FOREIGN)):
        logger.handlers = [handler]
        logger.propagate = False
    for name in FOREIGN:
        logging.getLogger(name).setLevel("DEBUG" if level == "debug" else "WARNING")


def event(logger: logging.Logger, level: int, message: str, fields: Mapping[str, object]) -> None:
    """Log a message with named values behind it: `request status=200 ms=12`."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", message, extra={_FIELDS: fields})


class LineFormatter(logging.Formatter):
    """Formats a record as 2026-01-31T08:15:00.123Z INFO weft.api request_id=… tenant=… message name=value. A traceback
    is a quoted value in the line."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [_time(record), record.levelname, record.name]
        parts += [f"{name}={value}" for name, value in _origin().items()]
        parts.append(record.getMessage().replace("\n", "\\n").replace("\r", "\\r"))
        parts += [f"{name}={_value(value)}" for name, value in _fields(record).items()]
        if record.exc_info:
            parts.append(f"traceback={json.dumps(self.formatException(record.exc_info), ensure_ascii=False)}")
        return " ".join(parts)


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object in a line. An event's own values do not hide the others."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            **_origin(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said | {**_fields(record), **said}, ensure_ascii=False, default=str)


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _origin() -> dict[str, str]:
    found = {"request_id": request_id.get(), "tenant": tenant.get()}
    return {name: value for name, value in found.items() if value}


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = record.__dict__.get(_FIELDS, {})
    return fields


def _value(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text, ensure_ascii=False)
