"""Several generations as one stream of deltas, each with the index of the prompt that it belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from weft.backends.contract import Deltas
from weft.types import Delta


async def merged(generations: Sequence[Deltas]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Deltas in the order in which they come. Ends when every generation has ended, or with the first error.

    A generation is asked for its next delta when its last one was taken: a slow reader gets larger deltas.
    """
    if len(generations) == 1:
        async for delta in generations[0]:
            yield 0, delta
        return
    asked = {asyncio.create_task(_next(deltas)): index for index, deltas in enumerate(generations)}
    try:
        while asked:
            answered, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for task in answered:
                index = asked.pop(task)
                if (answer := task.result()) is not None:
                    yield index, answer
                    asked[asyncio.create_task(_next(generations[index]))] = index
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def _next(deltas: Deltas) -> Delta | None:
    return await anext(deltas, None)
