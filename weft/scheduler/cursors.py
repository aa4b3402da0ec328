"""Cursors: how far a request is, and how far it may go.

A request has no phase. Its cursor has `known` units of work and `computed` ones, and scheduling means letting
`computed` catch up with `known`. For tokens a unit is a token: a prompt is many known tokens at once, decoding
is one more known token after each step. For an encoding the units are the prompt's tokens, and no more become known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from weft.plan import Extra, Gained, Limits, Pooled, PromptLogprobs, Row
from weft.scheduler.blocks import Block
from weft.scheduler.prefix import KeyChain, root_key
from weft.types import FinishReason, Pooling, Request, TokenLogprob


class Cursor(ABC):
    """A request, from its arrival to its end."""

    def __init__(self, request: Request, limit: int, block_size: int, arrival: int, arrived_at: float) -> None:
        self.request = request
        self.tokens = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt = len(request.prompt_token_ids)
        self.limit = limit
        """No more tokens than these can be known, prompt included."""
        self.block_size = block_size
        self.arrival = arrival
        """Counts requests: the smaller, the earlier it came."""
        self.arrived_at = arrived_at
        self.tenant = request.tenant

        self.computed = 0
        """Tokens whose keys and values are in the cache, or will be by the steps that are under way."""
        self.settled = 0
        """Those of them that were planned before the newest step that advances this request."""
        self.pending = 0
        """Tokens that steps under way will sample: known to exist, their values not yet."""
        self.row = -1
        """The worker's row; -1 while the request waits."""
        self.blocks: list[Block] = []
        self.keys = KeyChain(root_key(request.cache_salt), block_size)
        self.holds_all = False
        """Whether `blocks` has room for `limit` tokens: such a request never has to give way again."""
        self.preemptions = 0
        self.cached_tokens = 0
        """Prompt tokens that the prefix cache, or a sibling, held at the first admission."""
        self.queue_seconds = 0.0
        """From its arrival to its first admission."""
        self.reported = bool(request.output_token_ids)
        """Whether an event of this request has left: of this engine, or of one before it."""
        self.prompt_logprobs: list[TokenLogprob] = []
        """Of the prompt's tokens from the second on, as far as they have come. Preemption does not make them wrong."""
        self.ended = False

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def family(self) -> str:
        """The id of the leader of the siblings that it belongs to."""
        return self.request.sibling_of or self.request.request_id

    @property
    @abstractmethod
    def known(self) -> int: ...

    @property
    @abstractmethod
    def todo(self) -> int:
        """Tokens that a step could compute now."""

    @property
    @abstractmethod
    def decoding(self) -> bool:
        """One step away from the next token of an answer."""

    @property
    @abstractmethod
    def takes_cached(self) -> bool:
        """Whether tokens that others have computed need not be computed for this request."""

    @property
    @abstractmethod
    def scores_prompt(self) -> bool:
        """Whether the next tokens are computed for the log probabilities of the prompt."""

    @abstractmethod
    def samples(self, count: int) -> bool:
        """Whether a token is sampled after the next `count` ones."""

    @abstractmethod
    def extra(self, count: int) -> Extra | None:
        """What is asked of the next `count` tokens besides."""

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def gain(self, row: Row, gained: Gained) -> None:
        """Take in log probabilities: those that did not come before a preemption already."""
        self.prompt_logprobs += gained.logprobs[len(self.prompt_logprobs) - row.start :]

    def finish_after(self, token_id: int) -> FinishReason | None:
        """Whether the answer ends with this token, the last one known."""
        if token_id in self.request.stop_token_ids and self.num_output > self.request.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.limit else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id}, computed={self.computed}, known={self.known}, row={self.row})"


class TokenCursor(Cursor):
    """A request for tokens."""

    def __init__(
        self, request: Request, *, max_model_len: int, block_size: int, arrival: int = 0, arrived_at: float = 0.0
    ) -> None:
        max_tokens = request.params.max_tokens
        wanted = max_model_len if max_tokens is None else len(request.prompt_token_ids) + max_tokens
        super().__init__(request, min(max_model_len, wanted), block_size, arrival, arrived_at)

    @property
    def known(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def todo(self) -> int:
        """The last token that may be known need not be computed."""
        return 0 if self.known >= self.limit else self.known - self.computed

    @property
    def decoding(self) -> bool:
        """One token behind: `todo` is 1, and it is no prompt of one token. Asked for every running request in every
        step, so it is spelled out."""
        known = len(self.tokens) + self.pending
        return known - self.computed == 1 and self.computed > 0 and known < self.limit

    @property
    def takes_cached(self) -> bool:
        return not self.scores_prompt

    @property
    def scores_prompt(self) -> bool:
        """Until the first token is there: what came before it was delivered with it."""
        return (
            self.request.params.prompt_logprobs is not None
            and len(self.tokens) == self.num_prompt
            and self.computed < self.num_prompt - 1
        )

    def samples(self, count: int) -> bool:
        return self.computed + count == self.known

    def extra(self, count: int) -> Extra | None:
        num_top = self.request.params.prompt_logprobs
        return PromptLogprobs(num_top) if num_top is not None and self.scores_prompt else None


class EncodeCursor(Cursor):
    """A request for what the model makes of a prompt. Nothing is sampled."""

    def __init__(
        self, request: Request, pooling: Pooling, *, block_size: int, arrival: int = 0, arrived_at: float = 0.0
    ) -> None:
        super().__init__(request, len(request.prompt_token_ids), block_size, arrival, arrived_at)
        self.pooling = pooling

    @property
    def known(self) -> int:
        return self.num_prompt

    @property
    def todo(self) -> int:
        return self.num_prompt - self.computed

    @property
    def decoding(self) -> bool:
        return False

    @property
    def takes_cached(self) -> bool:
        """The hidden states of cached tokens are not kept."""
        return self.pooling is Pooling.LAST

    @property
    def scores_prompt(self) -> bool:
        return False

    def samples(self, count: int) -> bool:
        return False

    def extra(self, count: int) -> Extra | None:
        is_end = self.computed + count == self.num_prompt
        return Pooled(self.pooling, is_end) if is_end or self.pooling is Pooling.MEAN else None


def cursor_of(request: Request, limits: Limits, arrival: int, arrived_at: float) -> Cursor:
    if request.pooling is not None:
        return EncodeCursor(
            request, request.pooling, block_size=limits.block_size, arrival=arrival, arrived_at=arrived_at
        )
    return TokenCursor(
        request,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        arrival=arrival,
        arrived_at=arrived_at,
    )
