"""The translation between Weft's requests and vLLM's: parameters on the way in, tokens and logprobs on the way out.

vLLM gets token ids and gives token ids. Its own text, stop strings and usage are not asked for: Weft makes them of the
tokens, as it does for every engine.
"""

from __future__ import annotations

from typing import Any

from weft.errors import EngineFault
from weft.types import Event, FinishReason, Request, TokenLogprob

FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "error": FinishReason.ERROR,
}


def prompt_of(request: Request) -> list[int]:
    """Return the prompt: a request that another engine began goes on behind what it has delivered."""
    return request.prompt_token_ids + request.output_token_ids


def sampling_of(request: Request) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams, but the grammar. Raises EngineFault for a request that cannot go
    on where another engine left it."""
    params, num_delivered = request.params, len(request.output_token_ids)
    if params.grammar and num_delivered:
        raise EngineFault(
            "The engine was replaced in the middle of a structured answer, and vLLM can begin a form only at its "
            "beginning."
        )
    assert params.max_tokens is not None, "every default is resolved"
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "seed": _seed(request),
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": params.logit_bias or None,
        "max_tokens": params.max_tokens - num_delivered,
        "min_tokens": max(0, params.min_tokens - num_delivered),
        "stop_token_ids": request.stop_token_ids,
        "ignore_eos": params.ignore_eos,
        "logprobs": params.logprobs,
        "prompt_logprobs": None if num_delivered else params.prompt_logprobs,
        "detokenize": False,
    }


def _seed(request: Request) -> int | None:
    """Return the seed for vLLM, whose generator begins again with a resumed request; -1 would mean none to it."""
    seed = request.params.seed
    if seed is None or request.params.temperature == 0:
        return None
    return (seed + len(request.output_token_ids)) % 2**63


class VllmAnswer:
    """The outputs of vLLM for one request, as events."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._is_first = True

    def event(self, output: Any) -> Event:
        """Return the event of one RequestOutput, whose tokens are those since the last."""
        request, (completion,) = self._request, output.outputs
        token_ids = list(completion.token_ids)
        finish = None if completion.finish_reason is None else FINISH[completion.finish_reason]
        params, is_first = request.params, self._is_first
        self._is_first = False
        return Event(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=None if params.logprobs is None else logprobs_of(token_ids, completion.logprobs, params.logprobs),
            finish=finish,
            stop_token_id=token_ids[-1] if finish is FinishReason.STOP and token_ids else None,
            error="vLLM failed on this request." if finish is FinishReason.ERROR else "",
            cached_tokens=(output.num_cached_tokens or 0) if is_first else None,
            queue_seconds=_queue_seconds(output.metrics) if is_first else None,
            prompt_logprobs=logprobs_of(
                request.prompt_token_ids[1:], output.prompt_logprobs[1:], params.prompt_logprobs
            )
            if is_first and params.prompt_logprobs is not None and output.prompt_logprobs
            else None,
        )


def logprobs_of(token_ids: list[int], positions: Any, num_top: int) -> list[TokenLogprob]:
    """Return log probabilities from vLLM's tables: for every position, the likeliest tokens and the chosen one by
    rank."""
    return [
        TokenLogprob(
            table[token].logprob,
            tuple(
                sorted(
                    ((other, entry.logprob) for other, entry in table.items() if entry.rank <= num_top),
                    key=lambda scored: table[scored[0]].rank,
                )
            ),
        )
        for token, table in zip(token_ids, positions, strict=True)
    ]


def _queue_seconds(metrics: Any) -> float:
    return 0.0 if metrics is None else max(0.0, metrics.scheduled_ts - metrics.queued_ts)
