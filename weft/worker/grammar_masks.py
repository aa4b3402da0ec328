"""Rows that have a grammar: which tokens each of them may go on with.

A row's matcher goes on, and its next mask is computed, in a thread as soon as its last token is known: while the model
computes the logits that the mask is for. An engine learns its vocabulary, and imports llguidance, when the first
grammar comes; before that nothing here costs anything.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.errors import InvalidRequest
from weft.plan import Admission, Row, Sampled

if TYPE_CHECKING:
    from llguidance import LLMatcher

CACHED_GRAMMARS = 256
MAX_MASK_THREADS = 8
ROWS_AT_ONCE = 32
Words = NDArray[np.int64]


class Masks(NamedTuple):
    """What some rows of a batch may go on with."""

    places: Words
    """Which rows of the batch these are."""
    words: Words
    """[rows, words]: a bit for every logit."""


class Grammars:
    """Builds matchers for one vocabulary."""

    def __init__(
        self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_token_ids: Sequence[int], logits_width: int
    ) -> None:
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        # It can only read tokens. Grammars do not ask it to make any.
        words = SimpleNamespace(
            tokens=list(tokens), special_token_ids=special_ids, eos_token_id=eos_token_ids[0], bos_token_id=None
        )
        self._tokenizer = LLTokenizer(TokenizerWrapper(words), eos_token=list(eos_token_ids))
        self._limits = LLParserLimits(verbose_errors=False)
        self._built: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._builder = ThreadPoolExecutor(1, "weft-grammars")
        self.threads = ThreadPoolExecutor(min(MAX_MASK_THREADS, os.cpu_count() or 1), "weft-masks")
        self.mask_bytes = 4 * -(-len(tokens) // 32)
        self.num_words = -(-logits_width // 64)

    def build(self, grammar: str) -> Future[LLMatcher]:
        """A matcher that stands at the beginning, to be copied; InvalidRequest when there can be none."""
        built = self._built.get(grammar)
        if built is None:
            built = self._built[grammar] = self._builder.submit(self._build, grammar)
            if len(self._built) > CACHED_GRAMMARS:
                self._built.popitem(last=False)
        self._built.move_to_end(grammar)
        return built

    def _build(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InvalidRequest(f"The output's grammar cannot be built: {_first_line(matcher)}")
        return matcher


class Constraint:
    """How far one row is in its grammar."""

    def __init__(self, grammars: Grammars, grammar: str, token_ids: list[int]) -> None:
        """`token_ids`: what the row has written already."""
        self.error = ""
        """Why the row cannot go on, when it cannot."""
        self._grammars = grammars
        self._mask = np.zeros(grammars.num_words, np.int64)
        self._matcher: LLMatcher
        self._ahead = grammars.threads.submit(self._begin, grammars.build(grammar), token_ids)

    def mask(self) -> Words:
        """Waits for it. It is written over when the next token is known."""
        self._ahead.result()
        return self._mask

    def advance(self, token_id: int) -> None:
        """The row goes on with this token."""
        self._ahead = self._grammars.threads.submit(self._go_on, [token_id])

    def _begin(self, built: Future[LLMatcher], token_ids: list[int]) -> None:
        try:
            self._matcher = built.result().deep_copy()
        except InvalidRequest as error:
            self.error = error.message
        else:
            self._go_on(token_ids)

    def _go_on(self, token_ids: list[int]) -> None:
        if self._matcher.consume_tokens(token_ids):
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._grammars.mask_bytes)
        if self._matcher.is_error():
            self.error = f"The output's grammar cannot be followed any further: {_first_line(self._matcher)}"


class Constraints:
    """The rows that have a grammar."""

    def __init__(self) -> None:
        self._grammars: Grammars | None = None
        self._rows: dict[int, Constraint] = {}

    def learn(
        self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_token_ids: Sequence[int], logits_width: int
    ) -> None:
        """The bytes of every token, those that no text is made of, and those that end an answer."""
        # A tokenizer may have more tokens than the model has logits.
        known = range(min(len(tokens), logits_width))
        ends = [token for token in eos_token_ids if token in known]
        if ends:
            specials = [token for token in special_ids if token in known]
            self._grammars = Grammars(tokens[: len(known)], specials, ends, logits_width)

    def build(self, grammar: str) -> Future[LLMatcher]:
        """Prepare a grammar for the rows to come."""
        if self._grammars is None:
            raise InvalidRequest("This engine knows of no token that ends an answer, so it can follow no grammar.")
        return self._grammars.build(grammar)

    def admit(self, admission: Admission) -> None:
        self.release(admission.row)
        if admission.params.grammar:
            assert self._grammars is not None
            written = admission.token_ids[admission.num_prompt_tokens :]
            self._rows[admission.row] = Constraint(self._grammars, admission.params.grammar, written)

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def among(self, rows: list[Row]) -> dict[int, Constraint]:
        """Those of a step's rows that have one, by their places."""
        if not self._rows:
            return {}
        return {i: self._rows[row.row] for i, row in enumerate(rows) if row.row in self._rows}


def masks_of(constrained: dict[int, Constraint]) -> Masks:
    """Waits for them."""
    return Masks(np.array(list(constrained)), np.stack([constraint.mask() for constraint in constrained.values()]))


def followed(constrained: dict[int, Constraint], sampled: list[Sampled]) -> list[Sampled]:
    """Go on with what a step's rows sampled; an error instead for a row to which its grammar gave no mask."""
    for i, constraint in constrained.items():
        if constraint.error:
            sampled[i] = Sampled(sampled[i].token_id, error=constraint.error)
        elif not sampled[i].error:
            constraint.advance(sampled[i].token_id)
    return sampled


def rule_out(logits: Tensor, places: Tensor, words: Tensor) -> None:
    """Set to -inf, in place, the logits that the masks of some rows leave out; nothing here waits for the device."""
    bits = 2 ** torch.arange(8, dtype=torch.uint8, device=logits.device)
    masks = words.view(torch.uint8).view(len(places), -1)
    for at, mask in zip(torch.split(places, ROWS_AT_ONCE), torch.split(masks, ROWS_AT_ONCE), strict=True):
        allowed = (mask[:, :, None] & bits).flatten(1)[:, : logits.shape[1]] != 0
        logits[at] = logits[at].masked_fill_(~allowed, -torch.inf)


def _first_line(matcher: LLMatcher) -> str:
    return matcher.get_error().split("\n", 1)[0]
