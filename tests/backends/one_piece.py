"""An engine whose answers come whole: what the size of pieces is for."""

from __future__ import annotations

from typing import Any

import pytest

from weft.backends import BaseEngine
from weft.backends.contract import Engine, Stream
from weft.compat.hosted import HostedEngine
from weft.types import Output


class OnePiece(Stream):
    """An answer that is given when it is complete."""

    def __init__(self, inner: Stream) -> None:
        self._inner = inner
        self._given = False

    def __aiter__(self) -> OnePiece:
        return self

    async def __anext__(self) -> Output:
        if self._given:
            raise StopAsyncIteration
        self._given = True
        deltas = [delta async for delta in self._inner]
        return Output(
            text="".join(delta.text for delta in deltas),
            token_ids=[token for delta in deltas for token in delta.token_ids],
            finish=deltas[-1].finish,
            usage=deltas[-1].usage,
        )

    async def aclose(self) -> None:
        await self._inner.aclose()


def behind(engine: BaseEngine) -> Engine:
    assert isinstance(engine, HostedEngine) and engine._blocking is not None
    return engine._blocking.engine


def give_in_one_piece(engine: BaseEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = behind(engine)
    submit = inner.submit

    async def in_one_piece(*arguments: Any, **options: Any) -> OnePiece:
        return OnePiece(await submit(*arguments, **options))

    monkeypatch.setattr(inner, "submit", in_one_piece)
