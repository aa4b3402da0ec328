"""The text of one answer: events in, deltas out, with stop strings found on the way."""

from __future__ import annotations

from collections.abc import Sequence

from weft.text.detokenizer import Detokenizer
from weft.text.stops import StopStrings
from weft.text.tokenizer import Tokenizer
from weft.types import Delta, Event, FinishReason, Request, TokenLogprob, Usage


class OutputText:
    """Follows one request from its first event to its end. After the delta with `finish`, `ended` is true."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        params = request.params
        self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._num_prompt = len(request.prompt_token_ids)
        self._num_output = 0
        self._num_cached = 0
        self.ended = False

    def push(self, events: Sequence[Event]) -> Delta | None:
        """One delta for all that these events bring; None for nothing."""
        text, tokens = "", list[int]()
        logprobs: list[TokenLogprob] = []
        for event in events:
            if event.cached_tokens is not None and self._num_output == 0:
                self._num_cached = event.cached_tokens
            for i, token in enumerate(event.token_ids):
                self._num_output += 1
                tokens.append(token)
                logprobs += event.logprobs[i : i + 1] if event.logprobs else []
                found = self._stops.push(self._detokenizer.push([token]))
                text += found.text
                if found.matched is not None:
                    return self._last(text, tokens, logprobs, FinishReason.STOP, stop_reason=found.matched)
            if event.finish is not None:
                if not event.error:
                    rest = self._stops.push(self._detokenizer.flush())
                    text += rest.text + ("" if rest.matched else self._stops.flush())
                return self._last(
                    text, tokens, logprobs, event.finish, stop_reason=event.stop_token_id, error=event.error
                )
        return self._delta(text, tokens, logprobs) if text or tokens else None

    def _last(
        self,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprob],
        finish: FinishReason,
        *,
        stop_reason: str | int | None = None,
        error: str = "",
    ) -> Delta:
        self.ended = True
        return self._delta(text, tokens, logprobs, finish, stop_reason, error)

    def _delta(
        self,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprob],
        finish: FinishReason | None = None,
        stop_reason: str | int | None = None,
        error: str = "",
    ) -> Delta:
        return Delta(
            text=text,
            token_ids=tokens,
            logprobs=logprobs or None,
            finish=finish,
            stop_reason=stop_reason,
            error=error,
            usage=Usage(
                prompt_tokens=self._num_prompt,
                completion_tokens=self._num_output,
                cached_tokens=self._num_cached,
            ),
        )
