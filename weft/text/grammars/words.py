"""A vocabulary as grammars see it: the bytes of every token."""

from __future__ import annotations

from msgspec import Struct

from weft.text.tokenizer import Tokenizer


class Words(Struct, frozen=True, kw_only=True):
    tokens: list[bytes]
    """By id; empty for an id without a token."""
    special_ids: list[int]
    """Tokens that no text is made of."""
    eos_token_ids: list[int]


def words_of(tokenizer: Tokenizer) -> Words:
    """Takes a fraction of a second."""
    return Words(
        tokens=[tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)],
        special_ids=sorted(tokenizer.special_ids | set(tokenizer.eos_token_ids)),
        eos_token_ids=list(tokenizer.eos_token_ids),
    )
