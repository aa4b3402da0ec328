"""Texts in the worker: the hidden states of prompts that images are drawn from.

A text has a slot. Images of one prompt share it; it stays known after the last of them until its slot is needed. One
that a client has encoded itself is its image's alone.
"""

from __future__ import annotations

from collections import OrderedDict

from msgspec import Struct

from weft.payloads import PromptEmbeds
from weft.plan import PlacedText
from weft.types import Request


class TextKey(Struct, frozen=True):
    """Prompts of equal keys are one text."""

    cache_salt: str
    token_ids: tuple[int, ...]


Source = TextKey | PromptEmbeds


def sources_of(request: Request) -> tuple[Source | None, Source | None]:
    """What an image is drawn from and, where it is guided, what it is steered away from; None: no words at all."""
    image, given = request.image, request.given
    assert image is not None, "only images are drawn from texts"
    prompt = given.prompt or _key_of(request.prompt_token_ids, request.cache_salt)
    if image.passes == 1:
        return prompt, None
    return prompt, given.negative or _key_of(image.negative_token_ids, request.cache_salt)


def _key_of(token_ids: list[int], cache_salt: str) -> TextKey | None:
    return TextKey(cache_salt, tuple(token_ids)) if token_ids else None


class Text:
    """A slot, and what it holds."""

    __slots__ = ("is_being_encoded", "is_whole", "refs", "slot", "source")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.refs = 0
        """Images that are drawn from it."""
        self.source: Source | None = None
        """None: it holds nothing."""
        self.is_whole = False
        self.is_being_encoded = False
        """A row computes it."""

    def __repr__(self) -> str:
        return f"Text({self.slot}, refs={self.refs}, source={self.source!r:.40})"

    @property
    def placed(self) -> PlacedText:
        match self.source:
            case TextKey(token_ids=token_ids):
                return PlacedText(self.slot, len(token_ids))
            case PromptEmbeds(shape=(rows, _)) as embeds:
                return PlacedText(self.slot, rows, embeds)
        raise AssertionError("an image is drawn from nothing")


class Texts:
    def __init__(self, num_slots: int) -> None:
        self.slots = [Text(slot) for slot in range(num_slots)]
        self.unused = OrderedDict.fromkeys(self.slots)
        """Those that no image is drawn from, the next to be reused first: what holds nothing, then what was let go
        longest ago."""
        self.by_key: dict[TextKey, Text] = {}

    @property
    def num_used(self) -> int:
        return len(self.slots) - len(self.unused)

    def take(self, source: Source | None) -> Text | None:
        """For one more image that is drawn from this. There must be an unused slot."""
        if source is None:
            return None
        text = self.by_key.get(source) if isinstance(source, TextKey) else None
        if text is None:
            text, _ = self.unused.popitem(last=False)
            self._forget(text)
            text.source = source
            if isinstance(source, TextKey):
                self.by_key[source] = text
            else:
                text.is_whole = True
        elif text.refs == 0:
            del self.unused[text]
        text.refs += 1
        return text

    def give_back(self, text: Text) -> None:
        text.refs -= 1
        if text.refs:
            return
        self.unused[text] = None
        if not text.is_whole or not isinstance(text.source, TextKey):
            self._forget(text)
            self.unused.move_to_end(text, last=False)

    def forget_unused(self) -> None:
        for text in self.unused:
            self._forget(text)

    def _forget(self, text: Text) -> None:
        if isinstance(text.source, TextKey):
            del self.by_key[text.source]
        text.source = None
        text.is_whole = False
