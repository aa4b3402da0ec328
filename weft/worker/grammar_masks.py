"""Grammar masks: which tokens each row that has a grammar may sample next.

A row's matcher advances, and its next mask is computed, in a thread as soon as its last token is known: while the model
computes the logits that the mask is for. Along a draft the matcher advances as far as the grammar goes, for a mask at
each position, and is set back: what the model samples there may be something else. An engine learns its vocabulary, and
imports llguidance, when the first grammar comes; before that nothing here costs anything.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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
        """The mask of the next token, once the matcher has advanced to there."""

    def masks(self, draft: Sequence[int] = ()) -> Future[list[MaskWords]]:
        """Return the masks of the next token, and of the one behind each drafted token. The next `advance` overwrites
        the first. Behind a token that the grammar refuses there is no mask: the last one stands in its place, as
        nothing that is sampled there will hold."""
        if not draft:
            return self._ahead
        # Threads take up their work in order: the mask of the next token is computed, or being computed.
        return self._factory.threads.submit(self._along, self._ahead, draft)

    def advance(self, token_ids: list[int]) -> None:
        """Advance the matcher by the tokens that the row has sampled."""
        self._ahead = self._factory.threads.submit(self._consume, token_ids)

    def _begin(self, built: Future[LLMatcher], token_ids: list[int]) -> list[MaskWords]:
        try:
            self._matcher = built.result().deep_copy()
        except InvalidRequest as error:
            self.error = error.message
            return [self._mask]
        return self._consume(token_ids)

    def _consume(self, token_ids: list[int]) -> list[MaskWords]:
        if self._matcher.consume_tokens(token_ids):
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._factory.mask_bytes)
        if self._matcher.is_error():
            self.error = f"The output's grammar cannot be followed any further: {_first_line(self._matcher)}"
        return [self._mask]

    def _along(self, ahead: Future[list[MaskWords]], draft: Sequence[int]) -> list[MaskWords]:
        masks = [*ahead.result()]
        for token_id in [] if self.error else draft:
            if self._matcher.is_stopped() or not self._matcher.try_consume_tokens([token_id]):
                break
            masks.append(np.zeros_like(self._mask))
            self._matcher.unsafe_compute_mask_ptr(masks[-1].ctypes.data, self._factory.mask_bytes)
        if len(masks) > 1:
            self._matcher.rollback(len(masks) - 1)
        return masks + masks[-1:] * (1 + len(draft) - len(masks))


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
        """Return the constraints of those of these rows that have one, by row."""
        return {row.row: self._rows[row.row] for row in rows if row.row in self._rows} if self._rows else {}


def masks_of(constrained: dict[int, Constraint], sampling: list[Row], drafts: Mapping[int, Sequence[int]]) -> Masks:
    """Wait for the masks of a batch and return them. A row that has a draft is there once for each position."""
    promised = [(row, constraint.masks(drafts.get(row, ()))) for row, constraint in constrained.items()]
    masks = {row: iter(promise.result()) for row, promise in promised}
    places = [place for place, row in enumerate(sampling) if row.row in masks]
    return Masks(np.array(places), np.stack([next(masks[sampling[place].row]) for place in places]))


def follow(constrained: dict[int, Constraint], sampled: dict[int, list[Sampled]]) -> None:
    """Advance the constraints by the tokens that hold of those that a step sampled, by row. A row whose grammar gave
    no mask gets an error."""
    for row, constraint in constrained.items():
        first = sampled[row][0]
        if constraint.error:
            sampled[row] = [Sampled(first.token_id, error=constraint.error)]
        elif not first.error:
            constraint.advance([token.token_id for token in sampled[row]])


def rule_out(logits: Tensor, places: Tensor, words: Tensor) -> None:
    """Set to -inf, in place, the logits that the masks of some rows leave out, without waiting for the device."""
    bits = 2 ** torch.arange(8, dtype=torch.uint8, device=logits.device)
    masks = words.view(torch.uint8).view(len(places), -1)
    for at, mask in zip(torch.split(places, ROWS_AT_ONCE), torch.split(masks, ROWS_AT_ONCE), strict=True):
        allowed = (mask[:, :, None] & bits).flatten(1)[:, : logits.shape[1]] != 0
        logits[at] = logits[at].masked_fill_(~allowed, -torch.inf)


def _first_line(matcher: LLMatcher) -> str:
    return matcher.get_error().split("\n", 1)[0]
