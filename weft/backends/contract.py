"""The engine contract: all that a door (HTTP, gRPC, the Python API) knows of whatever generates behind it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from weft.errors import EngineFault, InvalidRequest, RequestTimeout, Unavailable, WeftError
from weft.text.tokenizer import Tokenizer
from weft.types import Delta, EngineStats, FinishReason, ModelInfo, SamplingParams


class Health(Struct, frozen=True):
    """`ready` is true only while the engine's loop beats and takes requests."""

    ready: bool
    reason: str = ""
    """Why not, when not: starting, restarting, draining, failed."""


Take = Callable[[Delta], Awaitable[None] | None]
"""Is given a delta. What it returns, if anything, is awaited before it is given the next one."""


class Deltas(Protocol):
    """The answer to one request, as it comes. A delta may carry several tokens: all that came since the last."""

    def __aiter__(self) -> Deltas: ...

    async def __anext__(self) -> Delta: ...

    async def follow(self, take: Take) -> None:
        """Give every delta to `take`, to the last one. An engine may call it at once when a token comes, which costs
        less than to wake a task."""
        async for delta in self:
            if (taking := take(delta)) is not None:
                await taking

    async def aclose(self) -> None:
        """End the request, whether or not it was ever iterated; its memory is free before the next step."""


class Engine(Protocol):
    """One model that is served."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The messages as the model's own chat template writes them, in tokens. Raises InvalidRequest."""

    async def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
    ) -> Deltas:
        """Check and queue one request; its deltas follow, the last one with `finish`.

        Raises InvalidRequest, Overloaded or Unavailable before anything is queued. Whoever stops reading early
        must call `aclose`.
        """

    def health(self) -> Health: ...

    def stats(self) -> EngineStats:
        """Counters go on rising when the engine behind them is replaced."""

    def restarts(self) -> int:
        """How often the engine process was replaced."""

    def open_requests(self) -> int: ...

    async def close(self) -> None: ...


def failure_of(delta: Delta) -> WeftError | None:
    """The error that a request's last delta stands for; None for an answer that ended as it should."""
    match delta.finish:
        case None | FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.TIMEOUT:
            return RequestTimeout(delta.error or "The request took too long and was ended.")
        case FinishReason.REJECTED:
            return InvalidRequest(delta.error or "The engine refused the request.")
        case FinishReason.ABORT:
            return Unavailable(delta.error or "The server ended the request.")
        case FinishReason.ERROR:
            return EngineFault(delta.error or "The engine failed while it worked on this request.")
