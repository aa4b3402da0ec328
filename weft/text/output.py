"""The text of one answer: what the engine brought in, deltas out, with stop strings found on the way."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from weft.text.detokenizer import Detokenizer
from weft.text.stops import StopStrings
from weft.text.tokenizer import Tokenizer
from weft.types import Arrival, Delta, Event, FinishReason, Request, TokenLogprob, Usage

_NOTHING = Event(request_id="")


class OutputText:
    """Follows one request from its first arrival to its end. After the delta with `finish`, `ended` is true."""

    def __init__(self, tokenizer: Tokenizer, request: Request, markers: Collection[str] = ()) -> None:
        params = request.params
        self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens, markers)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._matched: str | None = None
        """The stop string that was found."""
        self._own_stop_ids = params.stop_token_ids
        """Those that the request asked for: the model's own end is not worth telling."""
        self._num_prompt = len(request.prompt_token_ids)
        self._num_output = 0
        self._num_cached = 0
        self.ended = False

    def push(self, arrived: Sequence[Arrival]) -> Delta | None:
        """One delta for all that arrived; None for nothing."""
        if len(arrived) == 1 and self._stops is None and isinstance(token := arrived[0], int):
            self._num_output += 1
            return Delta(text=self._detokenizer.push_one(token), token_ids=[token], usage=self._usage())
        text, tokens = "", list[int]()
        logprobs: list[TokenLogprob] = []
        first = _NOTHING
        for arrival in arrived:
            if isinstance(arrival, int):
                tokens.append(arrival)
                text += self._text_of(arrival)
                if self._matched is not None:
                    break
                continue
            if arrival.cached_tokens is not None and self._num_output == 0:
                self._num_cached = arrival.cached_tokens
                first = arrival
            for i, token in enumerate(arrival.token_ids):
                tokens.append(token)
                logprobs += arrival.logprobs[i : i + 1] if arrival.logprobs else []
                text += self._text_of(token)
                if self._matched is not None:
                    break
            if self._matched is not None:
                break
            if arrival.finish is not None:
                self.ended = True
                if not arrival.error:
                    text += self._flush()
                asked = arrival.stop_token_id if arrival.stop_token_id in self._own_stop_ids else None
                return self._delta(text, tokens, logprobs, first, arrival.finish, asked, arrival.error)
        if self._matched is not None:
            self.ended = True
            return self._delta(text, tokens, logprobs, first, FinishReason.STOP, self._matched)
        return self._delta(text, tokens, logprobs, first) if text or tokens else None

    def _text_of(self, token: int) -> str:
        """What may be shown once this token is known."""
        self._num_output += 1
        text = self._detokenizer.push_one(token)
        if self._stops is None:
            return text
        found = self._stops.push(text)
        self._matched = found.matched
        return found.text

    def _flush(self) -> str:
        """What was held back, now that no more tokens will come."""
        text = self._detokenizer.flush()
        if self._stops is None:
            return text
        rest = self._stops.push(text)
        return rest.text + ("" if rest.matched else self._stops.flush())

    def _delta(
        self,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprob],
        first: Event,
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
            usage=self._usage(),
            prompt_logprobs=first.prompt_logprobs,
            queue_seconds=first.queue_seconds,
            embedding=first.embedding,
        )

    def _usage(self) -> Usage:
        return Usage(prompt_tokens=self._num_prompt, completion_tokens=self._num_output, cached_tokens=self._num_cached)
