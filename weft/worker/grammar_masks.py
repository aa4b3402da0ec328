"""Grammar masks: which tokens each row that has a grammar may sample next.

A row's matcher advances, and its next mask is computed, in a thread as soon as its last token is known: while the model
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
from weft.plan import Row, RowAdmission, Sampled

if TYPE_CHECKING:
    from llguidance import LLMatcher

CACHED_GRAMMARS = 256
MAX_MASK_THREADS = 8
ROWS_AT_ONCE = 32
MaskWords = NDArray[np.int64]


class Masks(NamedTuple):
    """The masks of the rows of a batch that have a grammar."""

    places: MaskWords
    """Places of these rows in the batch."""
    words: MaskWords
    """[rows, words]: one bit for every logit; set bits are allowed."""


class MatcherFactory:
    """The factory builds matchers for one vocabulary, and caches them by grammar."""

    def __init__(
        self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_token_ids: Sequence[int], logits_width: int
    ) -> None:
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        # It can only read tokens. MatcherFactory do not ask it to make any.
        vocabulary = SimpleNamespace(
            tokens=list(tokens), special_token_ids=special_ids, eos_token_id=eos_token_ids[0], bos_token_id=None
        )
        self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=list(eos_token_ids))
        self._limits = LLParserLimits(verbose_errors=False)
        self._built: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._builder = ThreadPoolExecutor(1, "weft-grammars")
        self.threads = ThreadPoolExecutor(min(MAX_MASK_THREADS, os.cpu_count() or 1), "weft-masks")
        self.mask_bytes = 4 * -(-len(tokens) // 32)
        self.num_words = -(-logits_width // 64)

    def build(self, grammar: str) -> Future[LLMatcher]:
        """Return a matcher at its start, to be copied; the future raises InvalidRequest when the grammar cannot be
        built."""
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
    """The grammar of one row, and how far the row has followed it."""

    def __init__(self, factory: MatcherFactory, grammar: str, token_ids: list[int]) -> None:
        """Start to follow a grammar after `token_ids`, which the row has sampled already."""
        self.error = ""
        """The reason why the row cannot go on; empty while it can."""
        self._factory = factory
        self._mask = np.zeros(factory.num_words, np.int64)
        self._matcher: LLMatcher
        self._ahead = factory.threads.submit(self._begin, factory.build(grammar), token_ids)

    def mask(self) -> MaskWords:
        """Wait for the mask and return it. The next `advance` overwrites it."""
        self._ahead.result()
        return self._mask

    def advance(self, token_id: int) -> None:
        """Advance the matcher by the token that the row has sampled."""
        self._ahead = self._factory.threads.submit(self._consume, [token_id])

    def _begin(self, built: Future[LLMatcher], token_ids: list[int]) -> None:
        try:
            self._matcher = built.result().deep_copy()
        except InvalidRequest as error:
            self.error = error.message
        else:
            self._consume(token_ids)

    def _consume(self, token_ids: list[int]) -> None:
        if self._matcher.consume_tokens(token_ids):
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._factory.mask_bytes)
        if self._matcher.is_error():
            self.error = f"The output's grammar cannot be followed any further: {_first_line(self._matcher)}"


class Constraints:
    """The constraints of all rows that have a grammar."""

    def __init__(self) -> None:
        self._factory: MatcherFactory | None = None
        self._rows: dict[int, Constraint] = {}

    def learn(
        self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_token_ids: Sequence[int], logits_width: int
    ) -> None:
        """Take the vocabulary: the bytes of every token, the special tokens, and those that end an answer."""
        # A tokenizer may have more tokens than the model has logits.
        known = range(min(len(tokens), logits_width))
        ends = [token for token in eos_token_ids if token in known]
        if ends:
            specials = [token for token in special_ids if token in known]
            self._factory = MatcherFactory(tokens[: len(known)], specials, ends, logits_width)

    def build(self, grammar: str) -> Future[LLMatcher]:
        """Build a grammar before its row is admitted."""
        if self._factory is None:
            raise InvalidRequest("This model has no token that ends an answer, so no grammar can be followed.")
        return self._factory.build(grammar)

    def admit(self, admission: RowAdmission) -> None:
        self.release(admission.row)
        if admission.params.grammar:
            assert self._factory is not None
            written = admission.token_ids[admission.num_prompt_tokens :]
            self._rows[admission.row] = Constraint(self._factory, admission.params.grammar, written)

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def among(self, rows: list[Row]) -> dict[int, Constraint]:
        """Return the constraints of a step's rows, by their places."""
        if not self._rows:
            return {}
        return {i: self._rows[row.row] for i, row in enumerate(rows) if row.row in self._rows}


def masks_of(constrained: dict[int, Constraint]) -> Masks:
    """Wait for the masks of these rows and return them."""
    return Masks(np.array(list(constrained)), np.stack([constraint.mask() for constraint in constrained.values()]))


def followed(constrained: dict[int, Constraint], sampled: list[Sampled]) -> list[Sampled]:
    """Advance the constraints by what a step sampled; a row whose grammar gave no mask gets an error."""
    for i, constraint in constrained.items():
        if constraint.error:
            sampled[i] = Sampled(sampled[i].token_id, error=constraint.error)
        elif not sampled[i].error:
            constraint.advance(sampled[i].token_id)
    return sampled


def rule_out(logits: Tensor, places: Tensor, words: Tensor) -> None:
    """Set to -inf, in place, the logits that the masks of some rows leave out, without waiting for the device."""
    bits = 2 ** torch.arange(8, dtype=torch.uint8, device=logits.device)
    masks = words.view(torch.uint8).view(len(places), -1)
    for at, mask in zip(torch.split(places, ROWS_AT_ONCE), torch.split(masks, ROWS_AT_ONCE), strict=True):
        allowed = (mask[:, :, None] & bits).flatten(1)[:, : logits.shape[1]] != 0
        logits[at] = logits[at].masked_fill_(~allowed, -torch.inf)


def _first_line(matcher: LLMatcher) -> str:
    return matcher.get_error().split("\n", 1)[0]
