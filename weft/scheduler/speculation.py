"""Speculative decoding. By prompt lookup the last tokens of a sequence are looked up earlier in the sequence, or in a
text that the client expects to be repeated, and the tokens that followed them there are drafted as those that follow
now. Otherwise the worker's draft model drafts: here is decided when, and how many.

A step computes a row's last token and its draft, and samples a token at each of these positions, exactly as steps of
one token would: noise is a hash of the seed and the position. A sampled token holds as long as everything before it is
what was drafted. So the answer is the one without drafts, whatever its parameters, and no draft can make it wrong: a
bad one costs time and nothing else. A request that is drafted for in vain is left alone for ever longer times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from weft.plan import TO_DRAFT, DraftPrefill

LONGEST_MATCH = 4
"""Tokens of a match, at most; the shortest has two."""
MAX_CANDIDATES = 16
"""Earlier places of the last two tokens that are compared, the latest first."""
MAX_INDEXED = 1024
"""Tokens that are indexed at once, in about a millisecond: the index of a long prompt takes many steps."""

FIRST_DRAFT = 2
MAX_DRAFT = 8
FIRST_PAUSE = 4
MAX_PAUSE = 256
"""The pause after a draft that did not pay, in tokens. Every further one doubles it, and one that pays resets it."""


class NgramIndex:
    """The index finds the places in a text where the last tokens of a sequence stand: in the sequence itself, of which
    the text grows, or in another one. It takes constant time for each token, and about 120 bytes."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text
        self._latest: dict[int, int] = {}
        """The latest place of every pair of tokens that a token follows: the position of the second one."""
        self._earlier = array("i", [0])
        """For each position, the place before it of the pair that ends there; 0: there is none."""

    def extend(self) -> None:
        """Take in the tokens that have become known, or the next ones of many."""
        text, latest, earlier = self.text, self._latest, self._earlier
        first = len(earlier)
        for at in range(first, min(len(text) - 1, first + MAX_INDEXED)):
            pair = text[at - 1] << 32 | text[at]
            earlier.append(latest.get(pair, 0))
            latest[pair] = at

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the position behind the longest match of the last of these tokens, the latest of several, and the
        length of the match; 0 and 1: there is none."""
        text, last = self.text, len(tokens) - 1
        at = self._latest.get(tokens[last - 1] << 32 | tokens[last], 0) if last > 0 else 0
        found, longest = 0, 1
        for _ in range(MAX_CANDIDATES):
            if not at or longest == LONGEST_MATCH:
                break
            length, most = 2, min(LONGEST_MATCH, at + 1, last + 1)
            while length < most and text[at - length] == tokens[last - length]:
                length += 1
            if length > longest:
                found, longest = at + 1, length
            at = self._earlier[at]
        return found, longest


class Draft(NamedTuple):
    """The draft of one row in a step."""

    tokens: list[int]
    prefill: DraftPrefill | None = None


NO_DRAFT = Draft([])


class Drafter(ABC):
    """The drafter of one request decides when to draft, and how much: more after drafts that were right."""

    def __init__(self, tokens: Sequence[int]) -> None:
        """Draft for a request of these tokens, a list that grows."""
        self._tokens = tokens
        self._length = FIRST_DRAFT
        self._pause = FIRST_PAUSE
        self._resumes_at = 0
        """The number of known tokens before which nothing is drafted."""

    def draft(self, pending: int, most: int) -> list[int]:
        """Return at most `most` tokens to follow the last one, or none. Of the tokens before them, the last `pending`
        are being sampled."""
        if most <= 0 or len(self._tokens) < self._resumes_at:
            return []
        return self._guess(pending, min(most, self._length))

    @abstractmethod
    def _guess(self, pending: int, count: int) -> list[int]: ...

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Take in how much of a draft was right."""
        if 2 * num_accepted < num_drafted:
            self._length = FIRST_DRAFT
            self._resumes_at = len(self._tokens) + self._pause
            self._pause = min(MAX_PAUSE, 2 * self._pause)
            return
        self._pause = FIRST_PAUSE
        if num_accepted == num_drafted:
            self._length = min(MAX_DRAFT, max(self._length, 2 * num_drafted))
        else:
            self._length = max(FIRST_DRAFT, num_accepted)


class NgramDrafter(Drafter):
    """Drafts are looked up in the request itself, and in a text that its answer is expected to repeat."""

    def __init__(self, tokens: Sequence[int], prediction: Sequence[int] = ()) -> None:
        super().__init__(tokens)
        self._indices = [NgramIndex(text) for text in (prediction, tokens) if text]

    def _guess(self, pending: int, count: int) -> list[int]:
        """Return what followed the longest match. Tokens that are being sampled are taken to be what followed, too."""
        text, first, longest = self._tokens, 0, 1
        for index in self._indices:
            index.extend()
            found, length = index.find(self._tokens)
            if length > longest:
                text, first, longest = index.text, found, length
        if not first:
            return []
        known, stop = len(text), first + pending + count
        followed = list(text[first:stop])
        if text is self._tokens:
            # A match that overlaps its continuation repeats: what is drafted is drafted again.
            for at in range(known, stop):
                followed.append(followed[at - known])
        return followed[pending:]


class ModelDrafter(Drafter):
    """Drafts are made by the worker's draft model."""

    def _guess(self, pending: int, count: int) -> list[int]:
        return [TO_DRAFT] * count
