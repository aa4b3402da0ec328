"""Text to token ids and back, for one model."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

from weft.errors import InvalidRequest, ModelError
from weft.text.spelling import spelling_of
from weft.text.vocab import BUILDERS
from weft.types import TextAssets


class Tokenizer:
    """Immutable once built, and safe to share between threads."""

    def __init__(self, inner: tokenizers.Tokenizer, assets: TextAssets) -> None:
        inner.no_padding()
        inner.no_truncation()
        self._inner = inner
        self._spelling = spelling_of(inner)
        self._bytes: dict[int, bytes] = {}
        self.strips_leading_space = self._spelling.strips_leading_space
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in inner.get_added_tokens_decoder().items() if token.special
        )
        own_eos = [] if assets.eos_token_id is None else [assets.eos_token_id]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*assets.eos_token_ids, *own_eos]))
        self.bos_token: str | None = self._named_token("bos", assets.bos_token_id)
        self.eos_token: str | None = self._named_token("eos", assets.eos_token_id)
        # A tokenizer.json may add these itself; the assets ask only for what it does not.
        frame = inner.encode("", add_special_tokens=True).ids
        self._prefix = _framing("bos", assets.add_bos, assets.bos_token_id, frame)
        self._suffix = _framing("eos", assets.add_eos, assets.eos_token_id, frame)

    @classmethod
    def from_assets(cls, assets: TextAssets) -> Tokenizer:
        """Build the tokenizer that a model's files describe; ModelError when they are damaged or of no known kind."""
        if assets.kind == "json":
            return cls(_from_json(assets.tokenizer_json), assets)
        build = BUILDERS.get(assets.kind)
        if build is None:
            known = ", ".join(["json", *BUILDERS])
            raise ModelError(f"The model's tokenizer is of kind {assets.kind!r}; Weft has: {known}.")
        return cls(build(assets), assets)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Special tokens written out in the text become their ids; `add_special_tokens` frames it with bos and eos."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"The text has half a character at position {error.start}: {text[error.start]!r} is a lone surrogate.",
                hint="Send surrogates in pairs, or the character itself.",
            ) from error
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token adds to a text: not always whole characters, and none for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._inner.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            known = self._bytes[token_id] = b"" if token is None else self._spelling.bytes_of(token)
        return known

    def token_text(self, token_id: int) -> str:
        """The token as a reader sees it, U+FFFD for the parts that are not whole characters."""
        return self.token_bytes(token_id).decode(errors="replace")

    def _named_token(self, name: str, token_id: int | None) -> str | None:
        if token_id is None:
            return None
        token: str | None = self._inner.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            raise ModelError(f"The model's {name} token is {token_id}, which its tokenizer does not have.")
        return token


def _from_json(source: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(source)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"The model's tokenizer.json cannot be read: {error}.") from error


def _framing(name: str, wanted: bool, token_id: int | None, already: Sequence[int]) -> tuple[int, ...]:
    if not wanted:
        return ()
    if token_id is None:
        raise ModelError(f"The model asks for a {name} token around every text, and does not say which it is.")
    return () if token_id in already else (token_id,)
