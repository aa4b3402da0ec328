"""A client that does not read is not waited for without end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from weft.errors import RequestTimeout


async def in_time(sending: Awaitable[None], patience_s: float) -> None:
    """Wait until gRPC has taken a message; raises RequestTimeout after so long (0: never)."""
    try:
        async with asyncio.timeout(patience_s or None):
            await sending
    except TimeoutError as error:
        raise RequestTimeout(f"The client read nothing for {patience_s:g} s (--slow-reader-timeout-s).") from error
