"""Token ids to text while they arrive: whole characters only, each once, in time linear in the tokens."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from weft.text.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")

_LONGEST_CHARACTER_BYTES = 4


class Detokenizer:
    """The text of one request's output.

    Works on bytes, so the text does not depend on how the tokens are grouped into pushes. It continues the prompt:
    a space between prompt and output is kept, and a character that the prompt began is emitted when it is complete.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        shown: Collection[str] = (),
    ) -> None:
        """`shown` are special tokens that are not skipped, whatever `skip_special_tokens` says."""
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        if shown and self._hidden:
            self._hidden -= {token_id for token_id in self._hidden if tokenizer.token_text(token_id) in shown}
        self._utf8 = _utf8_decoder(errors="replace")
        self._utf8.decode(self._end_of(prompt_token_ids))
        self._strip_space = tokenizer.strips_leading_space and not self._has_bytes(prompt_token_ids)
        self._between_characters = self._nothing_held()

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; empty while a character is still in pieces."""
        return self._decode(b"".join(self._bytes(token_id) for token_id in token_ids))

    def push_one(self, token_id: int) -> str:
        """The same for one token."""
        data = b"" if token_id in self._hidden else self._token_bytes(token_id)
        if self._between_characters:
            # Most tokens are whole characters after whole characters: nothing has to be remembered of them.
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        return self._decode(data)

    def flush(self) -> str:
        """What was held: U+FFFD for a character that was never completed."""
        return self._utf8.decode(b"", final=True)

    def _decode(self, data: bytes) -> str:
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        text = self._utf8.decode(data)
        self._between_characters = self._nothing_held()
        return text

    def _nothing_held(self) -> bool:
        """Whether the next token's text depends on its own bytes alone."""
        held, _ = self._utf8.getstate()
        return not held and not self._strip_space

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
