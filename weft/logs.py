"""Logging: one line an event, with the request it belongs to, and never a prompt's text."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TextIO

request_id: ContextVar[str] = ContextVar("weft_request_id", default="")
"""The request that the running task serves; every line logged meanwhile carries it."""

_FOREIGN = ("uvicorn.error", "asyncio")


def set_up(level: str, stream: TextIO | None = None) -> None:
    """Send Weft's log, and the warnings of the libraries that it runs on, to one stream (standard error)."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(LineFormatter())
    weft = logging.getLogger("weft")
    weft.setLevel(level.upper())
    for logger in (weft, *map(logging.getLogger, _FOREIGN)):
        logger.handlers = [handler]
        logger.propagate = False
    for name in _FOREIGN:
        logging.getLogger(name).setLevel("DEBUG" if level == "debug" else "WARNING")


def event(logger: logging.Logger, level: int, message: str, fields: Mapping[str, object]) -> None:
    """Log a message with named values behind it: `request status=200 ms=12`."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s %s", message, " ".join(f"{name}={_value(value)}" for name, value in fields.items()))


class LineFormatter(logging.Formatter):
    """2026-01-31T08:15:00.123Z INFO weft.frontend request_id=… message. A traceback is a quoted value in the line."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        parts = [f"{seconds}.{int(record.msecs):03d}Z", record.levelname, record.name]
        if current := request_id.get():
            parts.append(f"request_id={current}")
        parts.append(record.getMessage().replace("\n", "\\n").replace("\r", "\\r"))
        if record.exc_info:
            parts.append(f"traceback={json.dumps(self.formatException(record.exc_info), ensure_ascii=False)}")
        return " ".join(parts)


def _value(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text, ensure_ascii=False)
