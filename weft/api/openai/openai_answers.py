"""The answers of Weft as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from weft import __version__
from weft.types import Timings, Usage

SYSTEM_FINGERPRINT = f"weft-{__version__}"


class PromptTokensDetails(Struct, frozen=True, omit_defaults=True):
    cached_tokens: int
    truncated_tokens: int = 0
    """Cut off the prompt's beginning, because truncate_prompt_tokens said so."""


class CompletionTokensDetails(Struct, frozen=True):
    accepted_prediction_tokens: int
    """Drafted tokens that are in the answer."""
    rejected_prediction_tokens: int
    """Drafted tokens that are not."""


class UsageBody(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Unset where nothing was drafted."""


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct, frozen=True):
    logprob: float
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For every token of the prompt, by token id; the first has none."""


class TimingsBody(Struct, frozen=True, kw_only=True):
    queue_ms: float | None
    """None: the engine does not tell."""
    ttft_ms: float
    inter_token_ms: float
    """On average."""
    total_ms: float
    tokens_per_second: float


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str


class CalledCustom(Struct, frozen=True):
    name: str
    input: str


class MadeCall(Struct, frozen=True, kw_only=True):
    id: str
    type: str = "function"
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET
    """A call of the type custom has this in its place."""


class ChatMessage(Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[MadeCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET
    """The one call of an answer to a request with `functions`."""
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    timings: TimingsBody | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    system_fingerprint: str
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: str | int | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    timings: TimingsBody | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody
    system_fingerprint: str


class ModelCard(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "weft"
    max_model_len: int | UnsetType = UNSET
    """Context length; the longest prompt of an image model. Unset where it is not known."""
    capabilities: list[str] | UnsetType = UNSET
    state: str | UnsetType = UNSET
    """State of one of several models: unloaded, loading, loaded, unloading or failed."""
    why: str | UnsetType = UNSET
    """It failed."""
    sizes: list[str] | UnsetType = UNSET
    """Sizes of the images that it generates."""
    parent: str | UnsetType = UNSET
    """The model that an adapter is for."""
    root: str | UnsetType = UNSET


class ModelList(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class ServerCard(Struct, frozen=True):
    """GET /"""

    name: str
    version: str
    docs: str


class Version(Struct, frozen=True):
    version: str


def usage_body(usages: Sequence[Usage], n: int = 1, truncated_tokens: int = 0) -> UsageBody:
    """Return the usage of all choices, `n` of each prompt one after the other: a prompt counts once."""
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    completion = sum(usage.completion_tokens for usage in usages)
    drafted, accepted = sum(usage.draft_tokens for usage in usages), sum(usage.accepted_tokens for usage in usages)
    return UsageBody(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(sum(usage.cached_tokens for usage in usages[::n]), truncated_tokens),
        completion_tokens_details=CompletionTokensDetails(accepted, drafted - accepted) if drafted else UNSET,
    )


def timings_body(timings: Timings) -> TimingsBody:
    return TimingsBody(
        queue_ms=None if timings.queue_seconds is None else 1000 * timings.queue_seconds,
        ttft_ms=1000 * timings.first_token_seconds,
        inter_token_ms=1000 * timings.inter_token_seconds,
        total_ms=1000 * timings.total_seconds,
        tokens_per_second=timings.tokens / timings.total_seconds if timings.total_seconds else 0.0,
    )


def encoded_list(items: Iterable[object]) -> Any:
    """Encode a list item by item: as Python's values a long one would take many times the memory of its JSON."""
    return msgspec.Raw(b"[" + b",".join(map(msgspec.json.encode, items)) + b"]")


def with_items(answer: object, field: str, items: Iterable[object]) -> list[bytes]:
    """Encode an answer in pieces, with these items in the list of this name, which is empty."""
    name = f'"{field}":['.encode()
    # A string cannot hold this: its quotes are escaped.
    before, behind = msgspec.json.encode(answer).split(name + b"]", 1)
    pieces = [before + name]
    for number, item in enumerate(items):
        pieces.append((b"," if number else b"") + msgspec.json.encode(item))
    return [*pieces, b"]" + behind]
