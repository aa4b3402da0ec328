"""Cursors: how far a request is, and how far it may go.

A request has no phase. Its cursor has `known` units of work and `computed` ones, and scheduling means letting
`computed` catch up with `known`. For tokens a unit is a token: a prompt is many known tokens at once, decoding
is one more known token after each step. For an encoding the units are the prompt's tokens, and no more become known.
For an image they are the denoise steps that were asked for.
"""

from __future__ import annotations

import enum
import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence

from weft.plan import Extra, Gained, Held, Pooled, PromptLogprobs, Row
from weft.scheduler.block_pool import Block
from weft.scheduler.prompt_embeds import Text, TextKey
from weft.types import Adapter, FinishReason, ImageParams, Pooling, Request, TokenLogprob


def root_key(cache_salt: str, adapter: Adapter | None = None) -> bytes:
    """The parent of a sequence's first block: sequences of different roots share nothing. Of an adapter the number
    counts: another may have its name later."""
    number = 0 if adapter is None else adapter.number
    return hashlib.blake2b(repr((cache_salt, number)).encode(), digest_size=32).digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=32).digest()


class KeyChain:
    """The keys of a sequence's full blocks, each computed once, when its tokens are known."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self._keys = [root]
        self._block_size = block_size

    def of(self, tokens: Sequence[int], block: int) -> bytes:
        """The key of a sequence's block, counted from 0; its tokens and all before them must be known."""
        while len(self._keys) < block + 2:
            start = (len(self._keys) - 1) * self._block_size
            self._keys.append(block_key(self._keys[-1], tokens[start : start + self._block_size]))
        return self._keys[block + 1]


class Need(enum.Enum):
    """What a step may have none left of. Whoever needs it does not stand in the way of those who do not."""

    SCORING = "room for prompt tokens that are scored"
    CANVAS = "a canvas for an image"
    GIVEN = "a canvas, and room for tensors of a client"


class Cursor(ABC):
    """A request, or one stage of it, from its arrival to its end."""

    def __init__(self, request: Request, num_prompt: int, arrival: int, arrived_at: float) -> None:
        self.request = request
        self.num_prompt = num_prompt
        """Tokens of prompt that this stage computes."""
        self.arrival = arrival
        """Counts requests: the smaller, the earlier it came."""
        self.arrived_at = arrived_at
        self.tenant = request.tenant
        self.drawing: DenoiseCursor | None = None
        """Of an image: the cursor of its last stage, which holds what the image holds."""

        self.computed = 0
        """Units of work that are done, or will be by the steps that are under way."""
        self.preemptions = 0
        self.cached_tokens = 0
        """Prompt tokens that the prefix cache, or a sibling, held at the first admission."""
        self.queue_seconds: float | None = None
        """From its arrival to its first admission."""
        self.reported = bool(request.output_token_ids)
        """Whether an event of this request has left: of this engine, or of one before it."""
        self.ended = False

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    @abstractmethod
    def known(self) -> int: ...

    @property
    @abstractmethod
    def need(self) -> Need | None: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id}, computed={self.computed}, known={self.known})"


class RowCursor(Cursor):
    """A cursor over tokens: it has a row in the worker while it runs, and blocks of the cache."""

    def __init__(
        self, request: Request, tokens: list[int], num_prompt: int, limit: int, block_size: int, arrival: int,
        arrived_at: float,
    ) -> None:  # fmt: skip
        super().__init__(request, num_prompt, arrival, arrived_at)
        self.tokens = tokens
        self.limit = limit
        """No more tokens than these can be known, prompt included."""
        self.block_size = block_size

        self.settled = 0
        """Computed tokens that were planned before the newest step that advances this request."""
        self.pending = 0
        """Tokens that steps under way will sample: known to exist, their values not yet."""
        self.row = -1
        """The worker's row; -1 while the request waits."""
        self.blocks: list[Block] = []
        self.keys = KeyChain(root_key(request.cache_salt, request.adapter), block_size)
        self.holds_all = False
        """Whether `blocks` has room for `limit` tokens: such a request never has to give way again."""
        self.prompt_logprobs: list[TokenLogprob] = []
        """Of the prompt's tokens from the second on, as far as they have come. Preemption does not make them wrong."""

    @property
    def family(self) -> str:
        """The id of the leader of the siblings that it belongs to."""
        return self.request.sibling_of or self.request.request_id

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


class TokenCursor(RowCursor):
    """A request for tokens."""

    def __init__(
        self, request: Request, max_model_len: int, block_size: int, arrival: int = 0, arrived_at: float = 0.0
    ) -> None:
        prompt, max_tokens = request.prompt_token_ids, request.params.max_tokens
        wanted = max_model_len if max_tokens is None else len(prompt) + max_tokens
        tokens = [*prompt, *request.output_token_ids]
        limit = min(max_model_len, wanted)
        super().__init__(request, tokens, len(prompt), limit, block_size, arrival, arrived_at)

    @property
    def known(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def need(self) -> Need | None:
        return Need.SCORING if self.scores_prompt else None

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


class EncodeCursor(RowCursor):
    """What the model makes of a prompt. Nothing is sampled."""

    def __init__(
        self, request: Request, token_ids: Sequence[int], block_size: int, arrival: int, arrived_at: float
    ) -> None:
        num_prompt = len(token_ids)
        super().__init__(request, list(token_ids), num_prompt, num_prompt, block_size, arrival, arrived_at)

    @property
    def known(self) -> int:
        return self.num_prompt

    @property
    def need(self) -> Need | None:
        return None

    @property
    def todo(self) -> int:
        return self.num_prompt - self.computed

    @property
    def decoding(self) -> bool:
        return False

    @property
    def takes_cached(self) -> bool:
        """The hidden states of cached tokens are not kept."""
        return False

    @property
    def scores_prompt(self) -> bool:
        return False

    def samples(self, count: int) -> bool:
        return False


class PoolCursor(EncodeCursor):
    """A request for the vector of a prompt."""

    def __init__(
        self, request: Request, pooling: Pooling, block_size: int, arrival: int = 0, arrived_at: float = 0.0
    ) -> None:
        super().__init__(request, request.prompt_token_ids, block_size, arrival, arrived_at)
        self.pooling = pooling

    @property
    def takes_cached(self) -> bool:
        return self.pooling is Pooling.LAST

    def extra(self, count: int) -> Extra | None:
        is_end = self.computed + count == self.num_prompt
        return Pooled(self.pooling, is_end) if is_end or self.pooling is Pooling.MEAN else None


class TextCursor(EncodeCursor):
    """A stage of an image: one of its prompts, whose hidden states stay in the worker."""

    def __init__(self, drawing: DenoiseCursor, text: Text, key: TextKey, block_size: int) -> None:
        super().__init__(drawing.request, key.token_ids, block_size, drawing.arrival, drawing.arrived_at)
        self.drawing: DenoiseCursor = drawing
        self.text = text
        self.preemptions = drawing.preemptions

    @property
    def is_needless(self) -> bool:
        """Whether somebody was faster than one that waits."""
        return self.text.is_whole or self.text.is_being_encoded

    def extra(self, count: int) -> Extra | None:
        return Held(self.text.slot, self.computed + count == self.num_prompt)


class DenoiseCursor(Cursor):
    """The last stage of an image, and what it holds from its admission to its end: a canvas, and the texts that it is
    drawn from. It has neither a row nor blocks, so it gives way by not being planned, and loses nothing by that."""

    def __init__(
        self, request: Request, image: ImageParams, cost: int, arrival: int = 0, arrived_at: float = 0.0
    ) -> None:
        super().__init__(request, 0, arrival, arrived_at)
        self.drawing: DenoiseCursor = self
        self.image = image
        self.cost = cost
        """Of a step."""
        self.slot = -1
        """The canvas in the worker; -1 while the image waits for one."""
        self.texts: tuple[Text | None, Text | None] = None, None
        """What it is drawn from, and what it is steered away from; None: no words at all."""
        self.since = 0.0
        """When its present stage began."""
        self.is_begun = False
        """Whether the worker knows of it."""
        self.done = 0
        """Steps whose results have come."""

    @property
    def known(self) -> int:
        return self.image.steps

    @property
    def todo(self) -> int:
        return self.image.steps - self.computed

    @property
    def need(self) -> Need | None:
        if self.slot >= 0:
            return None
        return Need.GIVEN if self.request.given.num_bytes else Need.CANVAS

    @property
    def missing(self) -> list[Text]:
        """Its texts that are not whole."""
        return [text for text in self.texts if text is not None and not text.is_whole]

    @property
    def is_held_up(self) -> bool:
        """Whether others encode all that is missing."""
        return bool(self.missing) and all(text.is_being_encoded for text in self.missing)

    def shows_after(self, step: int) -> bool:
        """Whether the image is wanted once so many steps are done."""
        every = self.image.preview_every
        return step == self.image.steps or (every > 0 and step % every == 0)
