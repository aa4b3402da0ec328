"""Where an engine's tokens are not known, words stand for them."""

from __future__ import annotations

import re

_UNSPACED = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"
"""Chinese, Japanese and Korean write a character where others write a word."""
_WORD = re.compile(rf"\s*(?:[{_UNSPACED}]|[^\s{_UNSPACED}]+)|\s+")


def split_words(text: str) -> list[str]:
    """Each with the spaces before it; joined they are the text."""
    return _WORD.findall(text)
