"""The engine contract: all that a door (HTTP, gRPC, the Python API) knows of whatever generates behind it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from weft.errors import EngineFault, InvalidRequest, RequestTimeout, Unavailable, WeftError
from weft.text.parsers.reasoning import ReasoningStyle
from weft.text.parsers.styles import ToolStyle
from weft.text.tokenizer import Tokenizer
from weft.types import Delta, EngineStats, FinishReason, ImageParams, ModelInfo, Pooling, SamplingParams, Usage


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


class ChatPrompt(Struct, frozen=True):
    """A conversation as the model's own chat template writes it."""

    text: str
    token_ids: list[int]


class Embedding(Struct, frozen=True):
    """float32 values, and what they were made of."""

    data: bytes
    usage: Usage


class ImageUpdate(Struct, frozen=True, kw_only=True):
    """How far an image is."""

    step: int
    """How many of its steps are done."""
    image: bytes | None = None
    """Rows of RGB bytes: the image as it is after this step, when a preview was asked for, or it is the last."""
    finish: FinishReason | None = None
    error: str = ""
    usage: Usage = Usage()


class ImageUpdates(Protocol):
    """An image on its way: an update after every step, the last one with `finish`."""

    def __aiter__(self) -> ImageUpdates: ...

    async def __anext__(self) -> ImageUpdate: ...

    async def aclose(self) -> None:
        """End the request, whether or not it was ever iterated."""


class ChatStyles(Struct, frozen=True):
    """How this model writes what is not plain text; None: not at all, as far as is known."""

    tools: ToolStyle | None = None
    reasoning: ReasoningStyle | None = None


class Abilities(Struct, frozen=True, kw_only=True):
    """What an engine can be asked for besides plain sampling. What it cannot is refused, never dropped."""

    tokens: bool = True
    """Prompts are token ids, encoded on this side; else text and messages are passed on, and nothing that needs to
    know the model's tokens is possible."""
    seed: bool = True
    penalties: bool = True
    """Presence, frequency and repetition."""
    top_k: bool = True
    min_p: bool = True
    logit_bias: bool = True
    logprobs: bool = True
    prompt_logprobs: bool = True
    stop_tokens: bool = True
    """Stop token ids, min_tokens and ignore_eos."""
    grammar: bool = True
    """Structured output, and calls of tools that must come."""
    priority: bool = True
    cache_salt: bool = True
    embeddings: bool = True
    images: bool = True
    lora: bool = True


class Engine(Protocol):
    """One model that is served."""

    @property
    def name(self) -> str:
        """Of the kind of engine, as `weft engines` lists it."""

    @property
    def abilities(self) -> Abilities: ...

    @property
    def model(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def styles(self) -> ChatStyles: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """The messages as the model's own chat template writes them. Raises InvalidRequest.

        `continue_final_message`: the text ends with the last message's own, for the model to go on with.
        """

    async def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        priority: int = 0,
        tenant: str = "",
        sibling_of: str = "",
        markers: Collection[str] = (),
    ) -> Deltas:
        """Check and queue one request; its deltas follow, the last one with `finish`.

        `sibling_of` is the id of a request with the same prompt that was submitted before: the two share its blocks.
        `markers` are texts of special tokens that are shown whatever `skip_special_tokens` says: a parser needs them.

        Raises InvalidRequest, Overloaded or Unavailable before anything is queued. Whoever stops reading early
        must call `aclose`.
        """

    async def embed(
        self,
        prompt_token_ids: list[int],
        pooling: Pooling,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        priority: int = 0,
        tenant: str = "",
    ) -> Embedding:
        """The prompt as one vector of length 1. Raises as `submit` does. Cancelling it ends the request."""

    async def draw(
        self,
        prompt_token_ids: list[int],
        image: ImageParams,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        priority: int = 0,
        tenant: str = "",
    ) -> ImageUpdates:
        """Check and queue one image. Raises as `submit` does, and InvalidRequest when `model.images` is None or cannot
        draw this size or a prompt of this length."""

    def health(self) -> Health: ...

    def stats(self) -> EngineStats:
        """Counters go on rising when the engine behind them is replaced."""

    def restarts(self) -> int:
        """How often the engine process was replaced."""

    def open_requests(self) -> int: ...

    async def reset_cache(self) -> int:
        """Forget the prompts that were computed, and return how many blocks of them were known. What is in use stays
        in use. Raises Unavailable."""

    async def start_profile(self, folder: str) -> str:
        """Record what the engine spends its time on, and return the file that will tell. Raises InvalidRequest when
        that is being done already, and Unavailable."""

    async def stop_profile(self) -> str:
        """Write what was recorded, and return the file. Raises InvalidRequest when nothing was, and Unavailable."""

    async def close(self) -> None: ...


def failure_of(last: Delta | ImageUpdate) -> WeftError | None:
    """The error that a request's last word stands for; None for an answer that ended as it should."""
    match last.finish:
        case None | FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.TIMEOUT:
            return RequestTimeout(last.error or "The request took too long and was ended.")
        case FinishReason.REJECTED:
            return InvalidRequest(last.error or "The engine refused the request.")
        case FinishReason.ABORT:
            return Unavailable(last.error or "The server ended the request.")
        case FinishReason.ERROR:
            return EngineFault(last.error or "The engine failed while it worked on this request.")
