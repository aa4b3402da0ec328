"""One line an event, whatever is in it."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from weft.observe import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    names = ("weft", "uvicorn.error", "asyncio")
    before = {name: (logging.getLogger(name).handlers, logging.getLogger(name).level) for name in names}
    stream = io.StringIO()
    logs.set_up("info", stream)
    yield stream
    for name, (handlers, level) in before.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, True
        logger.setLevel(level)


def test_a_line_carries_its_request(stream: io.StringIO) -> None:
    token = logs.request_id.set("r-1")
    logs.event(logging.getLogger("weft.x"), logging.INFO, "request", {"status": 200, "seconds": 0.5, "path": "/a b"})
    logs.request_id.reset(token)
    assert stream.getvalue().endswith('Z INFO weft.x request_id=r-1 request status=200 seconds=0.500 path="/a b"\n')


def test_an_event_stays_on_one_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("weft.x").exception("it\nbroke")
    logs.event(logging.getLogger("weft.x"), logging.INFO, "request", {"path": "/a\nb"})
    first, second = stream.getvalue().splitlines()
    assert "it\\nbroke traceback=" in first and "ValueError" in first
    assert second.endswith('path="/a\\nb"')


def test_the_level_is_the_operator_s(stream: io.StringIO) -> None:
    logging.getLogger("weft.x").debug("quiet")
    logging.getLogger("uvicorn.error").info("quiet")
    logging.getLogger("uvicorn.error").warning("loud")
    assert "quiet" not in stream.getvalue() and "loud" in stream.getvalue()
