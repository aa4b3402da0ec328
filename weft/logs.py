"""Writes the log: one line for each event, and one for each request, with its id and tenant. Prompts are not logged
unless asked for."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TextIO

request_id: ContextVar[str] = ContextVar("weft_request_id", default="")
"""The request that the running task serves; every line logged meanwhile carries it."""

tenant: ContextVar[str] = ContextVar("weft_tenant", default="")
"""The name of the API key of the request that the running task serves; empty where no key is required."""

LogFormat = Literal["text", "json"]

FOREIGN = ("uvicorn.error", "asyncio")
SHORT_ID_CHARS = 8
"""So many characters of an id tell requests apart on a terminal."""
FIELDS, _TABLE = "weft_fields", "weft_table"


class RequestLine:
    """The line that a request leaves in the log, while those who work on it add what they know."""

    def __init__(self) -> None:
        self.fields: dict[str, object] = {}
        self.is_written = False


_request_line: ContextVar[RequestLine | None] = ContextVar("weft_request_line", default=None)
"""The line of the request that the running task serves."""


@contextmanager
def request_line() -> Iterator[RequestLine]:
    """Gather what is noted within for one line, which the caller writes at the end."""
    line = RequestLine()
    token = _request_line.set(line)
    try:
        yield line
    finally:
        line.is_written = True
        _request_line.reset(token)


def note(fields: Mapping[str, object]) -> bool:
    """Add values, but None, to the line of the request that the running task serves. Returns False where it has none,
    or where it is written already, as that of an answer in the background."""
    line = _request_line.get()
    if line is None or line.is_written:
        return False
    line.fields.update({name: value for name, value in fields.items() if value is not None})
    return True


def set_up(level: str, stream: TextIO | None = None, form: LogFormat = "text") -> None:
    """Send Weft's log, and the warnings of the libraries that it runs on, to one stream (standard error)."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    is_terminal = handler.stream.isatty()
    handler.setFormatter(JsonFormatter() if form == "json" else LineFormatter(is_terminal=is_terminal))
    weft = logging.getLogger("weft")
    weft.setLevel(level.upper())
    for logger in (weft, *map(logging.getLogger, FOREIGN)):
        logger.handlers = [handler]
        logger.propagate = False
    for name in FOREIGN:
        logging.getLogger(name).setLevel("DEBUG" if level == "debug" else "WARNING")


def event(
    logger: logging.Logger,
    level: int,
    message: str,
    fields: Mapping[str, object],
    table: Callable[[], Sequence[str]] | None = None,
) -> None:
    """Log a message with named values behind it: `request status=200 ms=12`. On a terminal the lines of a table, where
    there is one, take the place of the values."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", message, extra={FIELDS: fields, _TABLE: table})


class LineFormatter(logging.Formatter):
    """Formats a record as 2026-01-31T08:15:00.123Z INFO weft.api request_id=… tenant=… message name=value. A traceback
    is a quoted value in the line. On a terminal ids are short, and a table follows its message."""

    def __init__(self, *, is_terminal: bool = False) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def format(self, record: logging.LogRecord) -> str:
        parts = [_time(record), record.levelname, record.name]
        parts += [f"{name}={self._shown(name, value)}" for name, value in _origin().items()]
        parts.append(_one_line(record.getMessage()))
        table: Callable[[], Sequence[str]] | None = record.__dict__.get(_TABLE)
        if table is not None and self._is_terminal:
            return "\n".join([" ".join(parts), *(f"  {_one_line(line)}" for line in table())])
        fields = {name: value for name, value in _fields(record).items() if value is not None}
        parts += [f"{name}={_value(self._shown(name, value))}" for name, value in fields.items()]
        if record.exc_info:
            parts.append(f"traceback={_encoded(self.formatException(record.exc_info))}")
        return " ".join(parts)

    def _shown(self, name: str, value: object) -> object:
        """Return the value, and of an id on a terminal its beginning: `chatcmpl-` and eight characters."""
        if not self._is_terminal or not name.endswith("_id") or not isinstance(value, str):
            return value
        kind, dash, own = value.rpartition("-")
        return kind + dash + own[:SHORT_ID_CHARS]


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
        return _encoded(said | {**_fields(record), **said})


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _origin() -> dict[str, str]:
    found = {"request_id": request_id.get(), "tenant": tenant.get()}
    return {name: value for name, value in found.items() if value}


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = record.__dict__.get(FIELDS, {})
    return fields


def _value(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else _encoded(text)


def _encoded(value: object) -> str:
    """Write JSON in one line. JSON itself lets characters stand that end a line or steer a terminal."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if text.isprintable() else json.dumps(value, default=str)


def _one_line(text: str) -> str:
    """Escape what would end the line or steer a terminal."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
