"""Turns token ids into text while they arrive: whole characters only, each once, in time linear in the tokens."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from msgspec import Struct

from weft.errors import InvalidRequest
from weft.text.tokenizer import Tokenizer
from weft.types import Arrival, Event, FinishReason, Output, Request, TokenLogprob, Usage

_utf8_decoder = codecs.getincrementaldecoder("utf-8")

_LONGEST_CHARACTER_BYTES = 4


class Detokenizer:
    """The detokenizer writes the text of one request's output.

    Works on bytes, so the text does not depend on how the tokens are grouped into pushes. It continues the prompt:
    a space between prompt and output is kept, and a character that the prompt began is emitted when it is complete.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        shown: Collection[str] = (),
        *,
        continues: bool = False,
    ) -> None:
        """`shown` are special tokens that are not skipped, whatever `skip_special_tokens` says; `continues`: something
        stands before the prompt's token ids."""
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        if shown and self._hidden:
            self._hidden -= {token_id for token_id in self._hidden if tokenizer.token_text(token_id) in shown}
        self._utf8 = _utf8_decoder(errors="replace")
        self._utf8.decode(self._end_of(prompt_token_ids))
        self._strip_space = tokenizer.strips_leading_space and not (continues or self._has_bytes(prompt_token_ids))
        self._between_characters = self._nothing_pending()

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; empty while a character is still in pieces."""
        return self._decode(b"".join(self._bytes(token_id) for token_id in token_ids))

    def push_one(self, token_id: int) -> str:
        """Do the same as `push` for one token."""
        data = b"" if token_id in self._hidden else self._token_bytes(token_id)
        if self._between_characters:
            # Most tokens are whole characters after whole characters: nothing has to be remembered of them.
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        return self._decode(data)

    def flush(self) -> str:
        """Return the text that was held back, with U+FFFD for a character that was never completed."""
        return self._utf8.decode(b"", final=True)

    def _decode(self, data: bytes) -> str:
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        text = self._utf8.decode(data)
        self._between_characters = self._nothing_pending()
        return text

    def _nothing_pending(self) -> bool:
        """Return whether the next token's text depends on its own bytes alone."""
        pending, _ = self._utf8.getstate()
        return not pending and not self._strip_space

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._hidden else self._token_bytes(token_id)

    def _has_bytes(self, token_ids: Sequence[int]) -> bool:
        return any(self._bytes(token_id) for token_id in token_ids)

    def _end_of(self, token_ids: Sequence[int]) -> bytes:
        end = b""
        for token_id in reversed(token_ids):
            end = self._bytes(token_id) + end
            if len(end) >= _LONGEST_CHARACTER_BYTES:
                break
        return end[-_LONGEST_CHARACTER_BYTES:]


class StopMatch(Struct, frozen=True):
    """The text that may be shown now, and the stop string that ended the output, once one has."""

    text: str
    matched: str | None = None


class _Pattern:
    """A pattern tracks how much of one stop string the text so far ends with (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.progress = 0
        self._fallback = [0] * len(stop)
        """For each length of match, less one, the next shorter prefix of the stop string that also matches."""
        length = 0
        for at in range(1, len(stop)):
            while length and stop[at] != stop[length]:
                length = self._fallback[length - 1]
            length += stop[at] == stop[length]
            self._fallback[at] = length

    def feed(self, char: str) -> bool:
        """Take one more character; True when it completes the stop string, after which nothing may be fed."""
        while self.progress and char != self.stop[self.progress]:
            self.progress = self._fallback[self.progress - 1]
        self.progress += char == self.stop[self.progress]
        return self.progress == len(self.stop)


class StopStrings:
    """Watches one output for its stop strings.

    The earliest match is the first to be complete, so that generation can end there; of several that are complete
    at the same character, the longest. After a match the output is over, and text pushed later is dropped.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        if "" in stops:
            raise InvalidRequest("A stop string is empty.", param="stop")
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include = include
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> StopMatch:
        """Return the text that is safe to show, without what could still become a stop string."""
        if not self._patterns:
            return StopMatch(text)
        if self._matched is not None:
            return StopMatch("", self._matched)
        for at, char in enumerate(text):
            complete = [pattern.stop for pattern in self._patterns if pattern.feed(char)]
            if complete:
                return self._end(self._held + text[: at + 1], complete[0])
        shown = self._held + text
        safe = len(shown) - max(pattern.progress for pattern in self._patterns)
        self._held = shown[safe:]
        return StopMatch(shown[:safe])

    def flush(self) -> str:
        """Return the text that was held back, once no more will come."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, stop: str) -> StopMatch:
        self._matched, self._held = stop, ""
        return StopMatch(text if self._include else text[: -len(stop)], stop)


_NOTHING = Event(request_id="")


class OutputText:
    """Follows one request from its first arrival to its end. After the delta with `finish`, `ended` is true."""

    def __init__(self, tokenizer: Tokenizer, request: Request, markers: Collection[str] = ()) -> None:
        params = request.params
        token_ids = request.prompt_token_ids
        self._detokenizer = Detokenizer(
            tokenizer,
            token_ids[request.embeds[-1].stop :] if request.embeds else token_ids,
            params.skip_special_tokens,
            markers,
            continues=bool(request.embeds),
        )
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._matched: str | None = None
        """The stop string that was found."""
        self._own_stop_ids = params.stop_token_ids
        """The stop token ids that the request asked for; the model's own end token is not reported."""
        self._num_prompt = len(token_ids)
        self._num_output = 0
        self._num_cached = 0
        self._num_drafted = 0
        self._num_accepted = 0
        self.ended = False

    def push(self, arrived: Sequence[Arrival]) -> Output | None:
        """Return one delta for all that arrived; None for nothing."""
        if len(arrived) == 1 and self._stops is None and isinstance(token := arrived[0], int):
            self._num_output += 1
            return Output(text=self._detokenizer.push_one(token), token_ids=[token], usage=self._usage())
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
            self._num_drafted += arrival.draft_tokens
            for i, token in enumerate(arrival.token_ids):
                tokens.append(token)
                self._num_accepted += i < arrival.accepted_tokens
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
        """Return the text that may be shown once this token is known."""
        self._num_output += 1
        text = self._detokenizer.push_one(token)
        if self._stops is None:
            return text
        found = self._stops.push(text)
        self._matched = found.matched
        return found.text

    def _flush(self) -> str:
        """Return the text that was held back, now that no more tokens will come."""
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
    ) -> Output:
        return Output(
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
        return Usage(
            prompt_tokens=self._num_prompt,
            completion_tokens=self._num_output,
            cached_tokens=self._num_cached,
            draft_tokens=self._num_drafted,
            accepted_tokens=self._num_accepted,
        )
