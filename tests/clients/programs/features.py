"""What the programs share: where the server is, what is asked, and one line of JSON for every feature that is tried."""

import asyncio
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

URL = os.environ["WEFT_URL"]
V1 = URL + "/v1"
MODEL = os.environ["WEFT_MODEL"]
KEY = "none"
FEW = 48
"""Tokens of an answer: enough to see that one comes."""

QUESTION = "What is the capital of Germany?"
ASK = [{"role": "user", "content": QUESTION}]
City = Literal["Berlin", "Paris"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Berlin", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tell the weather of a city.", "parameters": SCHEMA},
}
LOOP = asyncio.new_event_loop()


def weather(city: City) -> str:
    """Tell the weather of a city.

    Args:
        city: The city whose weather is told.
    """
    called.append(city)
    return f"It rains in {city}."


called: list[str] = []
"""The cities that a client's tool was really called with."""


def feature(function: Callable[[], Any]) -> None:
    """Run a function at once, and print how the feature of its name ended: what it returns must not be empty."""
    try:
        came = function()
        if inspect.isawaitable(came):
            came = LOOP.run_until_complete(came)
        how = {"ok": bool(came), "said": str(came)[:80]}
    except Exception as error:
        how = {"ok": False, "status": _status(error), "said": f"{type(error).__name__}: {error}"[:1500]}
    print("FEATURE " + json.dumps({"feature": function.__name__, **how}), flush=True)


def pieces(parts: Any) -> str:
    """Return a streamed text that came in more than one piece."""
    texts = [part for part in parts if part]
    assert len(texts) > 1, f"{len(texts)} pieces came"
    return "".join(texts)


def until(is_done: Callable[[Any], bool], look: Callable[[], Any]) -> Any:
    """Return what is seen as soon as it is done."""
    while not is_done(seen := look()):
        time.sleep(0.2)
    return seen


async def apieces(parts: Any) -> str:
    return pieces([part async for part in parts])


def argument(text: str | dict[str, Any]) -> str:
    """Return the city that a call's arguments name."""
    city = (json.loads(text) if isinstance(text, str) else text)["city"]
    assert city in ("Berlin", "Paris"), city
    return str(city)


def _status(error: BaseException | None) -> int | None:
    """Return the HTTP status that an error, or one behind it, tells of."""
    for one in _chain(error):
        for told in (one, getattr(one, "response", None)):
            status = getattr(told, "status_code", None) or getattr(told, "status", None)
            if isinstance(status, int):
                return status
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
