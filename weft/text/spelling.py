"""The bytes that a token stands for, read off the tokenizer's own decoder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from msgspec import Struct

from weft.errors import ModelError


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes with: printable bytes as themselves, others from 256."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


class Spelling(Struct, frozen=True, kw_only=True):
    """How a vocabulary writes bytes: by an alphabet of its own, or as text with marks for spaces and lone bytes."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strips_leading_space: bool = False
    """The first character of a text is dropped when it is a space: encoding has put one there."""

    def bytes_of(self, token: str) -> bytes:
        if self.byte_level:
            # A token with a character outside the alphabet is an added one, written as it is.
            if all(char in _BYTE_ALPHABET for char in token):
                return bytes(_BYTE_ALPHABET[char] for char in token)
            return token.encode()
        for mark, text in self.replacements:
            token = token.replace(mark, text)
        if self.byte_fallback and (byte := _lone_byte(token)) is not None:
            return bytes((byte,))
        return token.encode()


def _lone_byte(token: str) -> int | None:
    """0xE4 for the token <0xE4>."""
    digits = token[3:5]
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">") and all(c in _HEX for c in digits):
        return int(digits, 16)
    return None


_HEX = frozenset("0123456789abcdefABCDEF")


def spelling_of(tokenizer: tokenizers.Tokenizer) -> Spelling:
    """The spelling that the tokenizer's decoder undoes, or a ModelError for a decoder that works otherwise."""
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
