"""Turns text into token ids and back, for one model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers
from msgspec import Struct

from weft.errors import ContextTooLong, InvalidRequest, ModelError
from weft.text.gguf_vocab import BUILDERS
from weft.types import TextAssets


def _byte_alphabet() -> dict[str, int]:
    """Return the alphabet of byte-level vocabularies: printable bytes as themselves, others from 256."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


class Spelling(Struct, frozen=True, kw_only=True):
    """The way a vocabulary writes bytes: by an alphabet of its own, or as text with marks for spaces and lone bytes."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strips_leading_space: bool = False
    """True when the first character of a text is dropped if it is a space: encoding has put one there."""

    def bytes_of(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes(map(_BYTE_ALPHABET.__getitem__, token))
            except KeyError:  # a character outside the alphabet: the token is an added one, written as it is
                return token.encode()
        for mark, text in self.replacements:
            token = token.replace(mark, text)
        if self.byte_fallback and (byte := _lone_byte(token)) is not None:
            return bytes((byte,))
        return token.encode()


def _lone_byte(token: str) -> int | None:
    """Return 0xE4 for the token <0xE4>."""
    digits = token[3:5]
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">") and all(c in _HEX for c in digits):
        return int(digits, 16)
    return None


_HEX = frozenset("0123456789abcdefABCDEF")


def spelling_of(tokenizer: tokenizers.Tokenizer) -> Spelling:
    """Return the spelling that the tokenizer's decoder undoes. Raises ModelError for a decoder that works otherwise."""
    if tokenizer.decoder is None:
        raise ModelError("The model's tokenizer.json has no decoder, so its tokens cannot be made text.")
    byte_level = byte_fallback = strips = False
    replacements: list[tuple[str, str]] = []
    for step in _steps(json.loads(tokenizer.decoder.__getstate__())):
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Replace", "pattern": {"String": str(mark)}, "content": str(text)}:
                replacements.append((mark, text))
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                strips = start == 1
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)}:
                replacements.append((mark, " "))
                strips = scheme != "never"
            case {"type": "Fuse"}:
                pass
            case _:
                raise ModelError(
                    f"The model's tokenizer decodes with {json.dumps(step)}, which Weft cannot do token by token.",
                    hint="Weft decodes byte-level and SentencePiece vocabularies.",
                )
    return Spelling(
        byte_level=byte_level,
        byte_fallback=byte_fallback,
        replacements=tuple(replacements),
        strips_leading_space=strips,
    )


def _steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


PIECE_CHARS = 1 << 16
_SHORTEN = "Shorten it, or serve with a larger --max-model-len."


def num_chars(value: object, enough: int) -> int:
    """Return how many characters the strings of a nested value have, and 1 for each of its other parts. It looks no
    further than `enough` of them."""
    count = 0
    waiting = [value]
    while waiting and count <= enough:
        part = waiting.pop()
        count += len(part) if isinstance(part, str) else 1
        if isinstance(part, Mapping):
            count += len(part)
            waiting += () if count > enough else (*part.keys(), *part.values())
        elif isinstance(part, Sequence) and not isinstance(part, str):
            count += len(part)
            waiting += () if count > enough else part
    return count


class FillInMiddle(Struct, frozen=True):
    """The tokens of a model that was trained to write the text between two others."""

    first: tuple[int, ...]
    """What begins every text of the model."""
    prefix: int
    suffix: int
    middle: int

    def prompt(self, before: Sequence[int], behind: Sequence[int]) -> list[int]:
        return [*self.first, *self.between(before, behind)]

    def between(self, before: Sequence[int], behind: Sequence[int]) -> list[int]:
        """Return the prompt without what begins every text."""
        return [self.prefix, *before, self.suffix, *behind, self.middle]


_FILL_IN_MIDDLE = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
)


class Tokenizer:
    """A tokenizer is immutable once built, and safe to share between threads."""

    def __init__(self, inner: tokenizers.Tokenizer, assets: TextAssets) -> None:
        inner.no_padding()
        inner.no_truncation()
        self._inner = inner
        self._spelling = spelling_of(inner)
        self._bytes: dict[int, bytes] = {}
        self.strips_leading_space = self._spelling.strips_leading_space
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.longest_token: int = max((len(self._spelling.bytes_of(token)) for token in vocabulary), default=1)
        """Bytes of the longest token."""
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

    @cached_property
    def fill_in_middle(self) -> FillInMiddle | None:
        """Return the tokens around a gap in a text; None: the model has none."""
        first = tuple(token for token in self.encode("") if token not in self.eos_token_ids)
        for marks in _FILL_IN_MIDDLE:
            prefix, suffix, middle = (self._inner.token_to_id(mark) for mark in marks)
            if prefix is not None and suffix is not None and middle is not None:
                return FillInMiddle(first, prefix, suffix, middle)
        return None

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

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Encode a text, in which special tokens become their ids; `add_special_tokens` frames it with bos and eos.

        Raises ContextTooLong for a text that surely has more than `max_tokens`, without encoding all of it. Other
        threads run meanwhile.
        """
        if max_tokens is not None:
            self.check_chars(len(text), max_tokens)
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"The text has half a character at position {error.start}: {text[error.start]!r} is a lone surrogate.",
                hint="Send surrogates in pairs, or the character itself.",
            ) from error
        # No token is shorter than a byte.
        if max_tokens is not None and num_bytes > max_tokens:
            self._check_pieces(text, max_tokens)
        ids = self._ids(text, add_special_tokens)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def check_chars(self, num_chars: int, max_tokens: int) -> None:
        """Raise ContextTooLong for a text of so many characters if `max_tokens` of the longest token are fewer."""
        if num_chars > max_tokens * self.longest_token:
            raise ContextTooLong(
                f"A text of {num_chars} characters has more than {max_tokens} tokens: the longest token has "
                f"{self.longest_token} bytes.",
                hint=_SHORTEN,
                param="prompt",
            )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        # A batch, of one: only then do other threads run meanwhile.
        text: str = self._inner.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token: not always whole characters, and none for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._inner.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            known = self._bytes[token_id] = b"" if token is None else self._spelling.bytes_of(token)
        return known

    def token_text(self, token_id: int) -> str:
        """Return the token as a reader sees it, with U+FFFD for the parts that are not whole characters."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its own spelling; None: there is none."""
        token_id: int | None = self._inner.token_to_id(token)
        return token_id

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch, of one: only then do other threads run meanwhile. Fast: without offsets, which nothing here needs.
        ids: list[int] = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def _check_pieces(self, text: str, max_tokens: int) -> None:
        """Raise ContextTooLong if the text, piece by piece, has more tokens. Where it is cut there may be a few more
        than in one piece, which do not matter: callers allow for several times the tokens that they can use."""
        count = 0
        for start in range(0, len(text), PIECE_CHARS):
            count += len(self._ids(text[start : start + PIECE_CHARS], add_special_tokens=False))
            if count > max_tokens:
                raise ContextTooLong(
                    f"A text of {len(text)} characters has more than {max_tokens} tokens.",
                    hint=_SHORTEN,
                    param="prompt",
                )

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
