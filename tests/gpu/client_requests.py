"""Requests to an engine's client, greedy and seeded, that several tests send, and their ends."""

from __future__ import annotations

import asyncio

from weft.engine.journal import Entry
from weft.types import Adapter, Event, Request, SamplingParams

PROMPTS = [[5, 9, 200, 31], list(range(3, 60)), [7] * 33, [250, 1, 17, 99, 4] * 9]
GREEDY = {"temperature": 0.0, "seed": 0}
SEEDED = {"temperature": 0.8, "top_p": 0.9, "seed": 5}


def requests(run: str, num_tokens: int = 24, adapter: Adapter | None = None) -> list[Request]:
    return [
        Request(
            request_id=f"{run} {kind} {i}",
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=num_tokens, **params),
            adapter=adapter,
        )
        for i, prompt in enumerate(PROMPTS)
        for kind, params in (("greedy", GREEDY), ("seeded", SEEDED))
    ]


async def end_of(entry: Entry) -> Event:
    """Return the last event of a request when it comes."""
    ended: asyncio.Future[Event] = asyncio.get_running_loop().create_future()

    def take() -> None:
        for arrival in entry.take():
            if isinstance(arrival, Event) and arrival.finish is not None:
                ended.set_result(arrival)

    entry.listener = take
    take()
    return await ended
