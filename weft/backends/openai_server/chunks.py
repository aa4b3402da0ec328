"""The messages of peers, as far as they are read. More fields do no harm; a field of the wrong type does."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Struct

from weft.backends.openai_server.peer_errors import PeerLost
from weft.types import TokenLogprob, Usage

TOKEN_ID = "token_id:"
LOWEST = -9999.0
"""The number that stands for minus infinity, which JSON does not have."""


class CachedTokens(Struct, frozen=True):
    cached_tokens: int | None = None


class PredictedTokens(Struct, frozen=True):
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class PeerUsage(Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: PredictedTokens | None = None

    def usage(self) -> Usage:
        details, predicted = self.prompt_tokens_details, self.completion_tokens_details or PredictedTokens()
        accepted = predicted.accepted_prediction_tokens or 0
        return Usage(
            prompt_tokens=self.prompt_tokens or 0,
            completion_tokens=self.completion_tokens or 0,
            cached_tokens=(details.cached_tokens or 0) if details is not None else 0,
            draft_tokens=accepted + (predicted.rejected_prediction_tokens or 0),
            accepted_tokens=accepted,
        )


class PeerTimings(Struct, frozen=True):
    queue_ms: float | None = None


class PeerLogprobs(Struct, frozen=True):
    """The log probabilities of a completion's tokens, which are named by their ids."""

    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None

    def logprobs(self, most: int) -> list[TokenLogprob]:
        """Return the log probabilities of tokens, with `most` of the likeliest. A peer may add the chosen one to
        those."""
        tops = self.top_logprobs or [None] * len(self.token_logprobs)
        if len(tops) != len(self.token_logprobs):
            raise PeerLost("it told log probabilities of more tokens than there are, or of fewer")
        return [
            TokenLogprob(LOWEST if chosen is None else chosen, _likeliest(top or {}, most))
            for chosen, top in zip(self.token_logprobs, tops, strict=True)
        ]


class PromptFigure(Struct, frozen=True):
    logprob: float


class TextChoice(Struct, frozen=True):
    text: str | None = ""
    token_ids: list[int] | None = None
    logprobs: PeerLogprobs | None = None
    prompt_logprobs: list[dict[str, PromptFigure] | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    timings: PeerTimings | None = None


class TextChunk(Struct, frozen=True):
    """A chunk of a plain completion."""

    choices: list[TextChoice]
    usage: PeerUsage | None = None


class FunctionDelta(Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class CallDelta(Struct, frozen=True):
    index: int = 0
    id: str | None = None
    function: FunctionDelta | None = None


class ChatDelta(Struct, frozen=True):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None


class PeerChatChoice(Struct, frozen=True):
    delta: ChatDelta
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    timings: PeerTimings | None = None


class ChatChunk(Struct, frozen=True):
    choices: list[PeerChatChoice]
    usage: PeerUsage | None = None


class ModelMeta(Struct, frozen=True):
    n_ctx: int | None = None


class PeerModel(Struct, frozen=True):
    id: str
    owned_by: str | None = ""
    max_model_len: int | None = None
    meta: ModelMeta | None = None


class PeerModels(Struct, frozen=True):
    data: list[PeerModel]


class PeerVector(Struct, frozen=True):
    embedding: list[float]


class PeerVectors(Struct, frozen=True):
    data: list[PeerVector]
    usage: PeerUsage | None = None


T = TypeVar("T", bound=Struct)


def read(body: bytes, kind: type[T]) -> T:
    """Raises Lost for what is something else."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        raise PeerLost(f"it sent what is no answer: {error}") from error


def prompt_figures(figures: list[dict[str, PromptFigure] | None], prompt: list[int], most: int) -> list[TokenLogprob]:
    """Return the log probabilities of every prompt token but the first. Raises PeerLost where some are missing."""
    if len(figures) != len(prompt):
        raise PeerLost(f"it told {len(figures)} log probabilities of a prompt of {len(prompt)} tokens")
    found = []
    for token, entries in zip(prompt[1:], figures[1:], strict=True):
        named = {TOKEN_ID + token_id: figure.logprob for token_id, figure in (entries or {}).items()}
        if (own := named.get(f"{TOKEN_ID}{token}")) is None:
            raise PeerLost(f"it told no log probability of the prompt's token {token}")
        found.append(TokenLogprob(own, _likeliest(named, most)))
    return found


def _likeliest(named: dict[str, float], most: int) -> tuple[tuple[int, float], ...]:
    ranked = sorted(named.items(), key=lambda entry: -entry[1])[:most]
    return tuple((_token_id(name), logprob) for name, logprob in ranked)


def _token_id(name: str) -> int:
    text = name.removeprefix(TOKEN_ID)
    if not (text.isascii() and text.isdigit()):
        raise PeerLost(f"it named a token {name!r:.40} and not by its id")
    return int(text)
