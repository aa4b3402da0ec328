"""Log probabilities in the two shapes that OpenAI gave them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, starmap

from weft.api.openai.openai_answers import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
    encoded_list,
)
from weft.serving.output_reader import CollectedOutput
from weft.text.tokenizer import Tokenizer
from weft.types import FinishReason, Output, TokenLogprob

MANY_FIGURES = 1024
"""Above this log probabilities are written in a thread."""
FIGURE_BYTES = 96
"""The memory that one log probability takes on average, from the engine's message to the answer."""

LOWEST = -9999.0
"""JSON has no minus infinity; OpenAI writes this."""


def token_name(tokenizer: Tokenizer, token_id: int, as_id: bool) -> str:
    """Return a token's name. By their text, several tokens may have the same one."""
    return f"token_id:{token_id}" if as_id else tokenizer.token_text(token_id)


def num_figures(output: Output | CollectedOutput) -> int:
    """Return how many log probabilities an output has, whose tokens all have as many."""
    return sum(len(each) * (len(each[0].top) + 1) for each in (output.logprobs, output.prompt_logprobs) if each)


def num_shown(tokenizer: Tokenizer, output: Output | CollectedOutput, *, skip_special_tokens: bool) -> int:
    """Return how many of an output's tokens are a chat's text: all but the one that ended it, if it is not shown.

    Completions tell of that one too: lm-eval and others drop the last figure, whichever token it is of.
    """
    token_ids = output.token_ids
    by_token = output.finish is FinishReason.STOP and not isinstance(output.stop_reason, str)
    is_hidden = by_token and skip_special_tokens and bool(token_ids) and token_ids[-1] in tokenizer.special_ids
    return len(token_ids) - is_hidden


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], *, as_ids: bool = False
) -> ChatLogprobs:
    def entry(token_id: int, logprob: float) -> TopLogprob:
        name = token_name(tokenizer, token_id, as_ids)
        return TopLogprob(name, max(logprob, LOWEST), list(tokenizer.token_bytes(token_id)))

    def figures(token_id: int, chosen: TokenLogprob) -> ChatLogprob:
        own = entry(token_id, chosen.logprob)
        return ChatLogprob(own.token, own.logprob, own.bytes, [entry(*top) for top in chosen.top])

    return ChatLogprobs(encoded_list(starmap(figures, zip(token_ids, logprobs, strict=True))))


def prompt_logprobs(tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Sequence[TokenLogprob]) -> PromptLogprobs:
    """Return for every token but the first its own figure, and those of the likeliest in its place."""

    def entry(token_id: int, logprob: float) -> tuple[str, PromptLogprob]:
        return str(token_id), PromptLogprob(max(logprob, LOWEST), tokenizer.token_text(token_id))

    def figures(token_id: int, own: TokenLogprob) -> dict[str, PromptLogprob]:
        return dict([entry(token_id, own.logprob), *(entry(*top) for top in own.top)])

    encoded: PromptLogprobs = encoded_list(chain([None], starmap(figures, zip(prompt[1:], logprobs, strict=True))))
    return encoded


def echoed_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Sequence[TokenLogprob], *, as_ids: bool = False
) -> tuple[CompletionLogprobs, int]:
    """Return the figures of a prompt that stands before its answer, and the offset behind it."""
    behind_first = len(tokenizer.token_text(prompt[0]))
    rest, offset = completion_logprobs(tokenizer, prompt[1:], logprobs, behind_first, as_ids=as_ids)
    return (
        CompletionLogprobs(
            tokens=[token_name(tokenizer, prompt[0], as_ids), *rest.tokens],
            token_logprobs=[None, *rest.token_logprobs],
            top_logprobs=[None, *rest.top_logprobs],
            text_offset=[0, *rest.text_offset],
        ),
        offset,
    )


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    text_offset: int,
    *,
    as_ids: bool = False,
) -> tuple[CompletionLogprobs, int]:
    """Return the tokens' figures, the first of them at `text_offset` characters, and the offset behind the last."""
    tokens = [token_name(tokenizer, token_id, as_ids) for token_id in token_ids]
    offsets = []
    for token_id in token_ids:
        offsets.append(text_offset)
        text_offset += len(tokenizer.token_text(token_id))
    chosen = [max(entry.logprob, LOWEST) for entry in logprobs]
    tops: list[dict[str, float] | None] = [
        # The chosen token is there even when it is not among the likeliest.
        {token_name(tokenizer, top_id, as_ids): max(top, LOWEST) for top_id, top in entry.top} | {token: own}
        for token, own, entry in zip(tokens, chosen, logprobs, strict=True)
    ]
    return (
        CompletionLogprobs(tokens=tokens, token_logprobs=[*chosen], top_logprobs=tops, text_offset=offsets),
        text_offset,
    )
