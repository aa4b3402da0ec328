"""Fill-in-the-middle: the prompt of a model that was trained to write what stands between two texts."""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import InvalidRequest
from weft.text.tokenizer import Tokenizer

FILE_TOKENS = ("<|file_sep|>", "<file_sep>")
"""The token before the name and the text of another file."""
UNNAMED_FILE = "\n\n--- snippet ---\n\n"


def fim_prompt(
    tokenizer: Tokenizer,
    prefix: str,
    suffix: str,
    *,
    begun: str = "",
    files: Sequence[tuple[str, str]] = (),
    max_tokens: int,
    param: str,
) -> list[int]:
    """Return the prompt for what stands between a prefix and a suffix. `begun`: how it begins. `files`: names and texts
    of other files, which come before. Raises InvalidRequest, of the field `param`, where the model has no tokens for
    it, and ContextTooLong for texts that surely have more than `max_tokens`."""
    marks = tokenizer.fill_in_middle
    if marks is None:
        raise InvalidRequest(
            f"{param}: this model has no tokens to fill in the middle of a text.",
            hint="Models for code have them, such as Qwen2.5-Coder.",
            param=param,
        )

    others = sum(len(name) + len(text) for name, text in files)
    tokenizer.check_chars(len(prefix) + len(suffix) + len(begun) + others, max_tokens)

    def encoded(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens)

    before: list[int] = []
    separator = next((found for name in FILE_TOKENS if (found := tokenizer.token_id(name)) is not None), None)
    for name, text in files:
        before += encoded(UNNAMED_FILE + text) if separator is None else [separator, *encoded(f"{name}\n{text}")]
    return [*marks.first, *before, *marks.between(encoded(prefix), encoded(suffix)), *encoded(begun)]
