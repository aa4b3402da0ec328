"""Cursors track how far a request has been computed, and answer what differs between kinds of requests.

A cursor has `known` units of work and `computed` ones, and scheduling lets `computed` catch up with `known`. For tokens
a unit is a token: prefill computes many known tokens at once, in chunks, and decode computes the one that the last step
sampled. With a draft decode computes the guessed tokens behind it as well, and `known` runs ahead until the result of
the step tells how many were right. For an encoding the units are the prompt's tokens, and no more become known. For an
image they are its denoise steps, before them the prompts that the pipeline's text encoder encodes, and after those that
show it the decodings.

Most requests have one stage. An image has up to three, each with a cursor of its own: its prompt and its negative
prompt are encoded by the language model, and then it is denoised. Prompts that are empty, that the client has encoded
or that another image has had encoded before are skipped. An image waits for admission as its last stage.
"""

from __future__ import annotations

import enum
import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import ClassVar, TypeGuard

from msgspec import Struct

from weft.payloads import EmbedsSegment
from weft.plan import (
    TO_DRAFT,
    Denoise,
    DenoiseAdmission,
    DraftPrefill,
    ImageLimits,
    KeptHiddenStates,
    Limits,
    PlacedEmbeds,
    Pooled,
    PromptLogprobs,
    Row,
    RowOutput,
    RowRequest,
    Sampled,
)
from weft.scheduler.block_pool import Block
from weft.scheduler.prompt_embeds import EmbedsPair, EmbedsSlot, ImageMemory, PromptKey, embeds_sources
from weft.scheduler.speculation import LONGEST_MATCH, NO_DRAFT, Draft, Drafter, ModelDrafter, NgramDrafter
from weft.types import Adapter, FinishReason, ImageParams, Pooling, Request, TokenLogprob


def root_key(cache_salt: str, adapter: Adapter | None = None) -> bytes:
    """Return the parent key of a sequence's first block: sequences of different roots share nothing. An adapter counts
    by its number, as another may have its name later."""
    number = 0 if adapter is None else adapter.number
    return hashlib.blake2b(repr((cache_salt, number)).encode(), digest_size=32).digest()


def block_key(parent: bytes, tokens: Sequence[int], rows: bytes = b"") -> bytes:
    """Return the key of a block; `rows` tells what prompt embeds stand in it, and where."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes() + rows, digest_size=32).digest()


class KeyChain:
    """The chain holds the keys of a sequence's full blocks, each computed once, when its tokens are known."""

    def __init__(self, root: bytes, block_size: int, embeds: Sequence[EmbedsSegment] = ()) -> None:
        self._keys = [root]
        self._block_size = block_size
        self._embeds = embeds

    def of(self, tokens: Sequence[int], block: int) -> bytes:
        """Return the key of a sequence's block, counted from 0; its tokens and all before them must be known."""
        while len(self._keys) < block + 2:
            start = (len(self._keys) - 1) * self._block_size
            stop = start + self._block_size
            rows = self._rows_within(start, stop) if self._embeds else b""
            self._keys.append(block_key(self._keys[-1], tokens[start:stop], rows))
        return self._keys[block + 1]

    def _rows_within(self, start: int, stop: int) -> bytes:
        """Return the digests of the rows at these positions, each run with its position and its length."""
        runs = [(max(start, part.start), part.digests_within(start, stop)) for part in self._embeds]
        return b"".join(array("q", (at, len(digests))).tobytes() + digests for at, digests in runs if digests)


class GenerateTokens(Struct, frozen=True):
    """Sample an answer to the prompt."""


class PoolPrompt(Struct, frozen=True):
    """Pool the prompt's hidden states into one vector."""

    pooling: Pooling


class EncodePrompt(Struct, frozen=True):
    """Keep the hidden states of a prompt in the worker."""

    key: PromptKey


class DenoiseStage(Struct, frozen=True):
    """Denoise an image, step by step."""

    image: ImageParams
    cost: int
    """Tokens that one denoise step counts as."""


Stage = GenerateTokens | PoolPrompt | EncodePrompt | DenoiseStage


def stages_of(request: Request, limits: Limits) -> list[Stage]:
    """Return the stages of a request that can be served within these limits."""
    image = request.image
    if image is None or limits.image is None:
        return [GenerateTokens() if request.pooling is None else PoolPrompt(request.pooling)]
    keys = dict.fromkeys(source for source in embeds_sources(request) if isinstance(source, PromptKey))
    return [*map(EncodePrompt, keys), DenoiseStage(image, limits.image.cost(image))]


class ScarceResource(enum.Enum):
    """A resource that only some requests need, and that a step may have none left of. Requests that need it queue
    apart, so that those that do not can pass them."""

    PROMPT_LOGPROBS = "budget for the log probabilities of prompt tokens"
    LATENT_SLOT = "a latent slot"
    CLIENT_TENSORS = "a latent slot, and bytes for a client's tensors"
    PROMPT_EMBEDS = "bytes for the prompt embeds of a client"


class Cursor(ABC):
    """A cursor is the state of a request, or of one stage of it, from its arrival to its end."""

    def __init__(self, request: Request, num_prompt: int, arrival: int, arrived_at: float) -> None:
        self.request = request
        self.num_prompt = num_prompt
        """Tokens of prompt that this stage computes."""
        self.arrival = arrival
        """The number of requests that arrived before it."""
        self.arrived_at = arrived_at
        self.tenant = request.tenant
        self.denoise_cursor: DenoiseCursor | None = None
        """The cursor of an image's last stage, which holds the image's memory; None for other requests."""

        self.tensor_bytes = 0
        """Bytes of prompt embeds that it holds; a preemption leaves them to it."""
        self.computed = 0
        """Units of work that are done, or will be after the steps that are under way."""
        self.preemptions = 0
        self.cached_tokens = 0
        """Prompt tokens that the prefix cache, or a sibling, held at the first admission."""
        self.queue_seconds: float | None = None
        """The time from its arrival to its first admission."""
        self.reported = bool(request.output_token_ids) or request.checkpoint is not None
        """True when an event of this request was sent, by this engine or by one before it."""
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
    def scarce_resource(self) -> ScarceResource | None:
        """The resource that the request may have to wait for longer than others; it stays the same while it waits."""
        return None

    def can_begin(self, prompt_logprobs_budget: int, memory: ImageMemory) -> bool:
        """Return whether the scarce resource that the request needs now is free."""
        return True

    @abstractmethod
    def begin(self, memory: ImageMemory, now: float) -> None:
        """Begin a stage that needs no row."""

    def release(self, memory: ImageMemory) -> None:
        """Give back what the request holds from its first admission to its end."""
        memory.client_bytes -= self.tensor_bytes
        self.tensor_bytes = 0

    def next_stage(self, memory: ImageMemory, limits: Limits) -> Cursor:
        """Return the cursor of the stage that comes next; the cursor itself when none is left before it."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id}, computed={self.computed}, known={self.known})"


class RowCursor(Cursor):
    """A cursor over tokens: it has a row in the worker while it runs, and blocks of the cache."""

    encodes: ClassVar[bool] = False
    """True when its prompt becomes a vector or prompt embeds, and no answer."""

    def __init__(
        self, request: Request, tokens: list[int], num_prompt: int, limit: int, block_size: int, arrival: int,
        arrived_at: float,
    ) -> None:  # fmt: skip
        super().__init__(request, num_prompt, arrival, arrived_at)
        self.tokens = tokens
        self.limit = limit
        """The largest number of tokens that can become known, prompt included."""
        self.block_size = block_size

        self.settled = 0
        """Computed tokens that were planned before the newest step that advances this request."""
        self.pending = 0
        """Tokens that steps under way will sample: known to exist, their values not yet. Of those behind a draft, how
        many exist is not known either."""
        self.drafted = 0
        """Drafted tokens under way: until their step is read the request is not planned again."""
        self.draft_computed = 0
        """Tokens that the draft model has computed, or will have after the steps that are under way."""
        self.row = -1
        """The worker's row; -1 while the request waits."""
        self.blocks: list[Block] = []
        self.keys = KeyChain(root_key(request.cache_salt, request.adapter), block_size, request.embeds)
        self.holds_all = False
        """True when `blocks` can hold `limit` tokens: such a request is never preempted again."""
        self.prompt_logprobs: list[TokenLogprob] = []
        """Log probabilities of the prompt's tokens from the second on that have arrived; they outlive a preemption."""

    @property
    def needs_row(self) -> bool:
        return True

    def begin(self, memory: ImageMemory, now: float) -> None:
        raise AssertionError(f"{self} begins in a row")

    def enter_row(self, row: int, memory: ImageMemory, now: float) -> None:
        self.row = row
        if self.preemptions == 0:
            self.queue_seconds = now - self.arrived_at
            self.cached_tokens = min(self.computed, self.num_prompt)

    def leave_row(self) -> None:
        self.row = -1
        self.blocks = []
        self.holds_all = False

    def preempted(self) -> None:
        """Start over: the request has lost its row and its blocks."""
        self.computed = self.settled = self.draft_computed = 0
        self.preemptions += 1

    @property
    def family(self) -> str:
        """The request id of the leader of its siblings."""
        return self.request.sibling_of or self.request.request_id

    @property
    @abstractmethod
    def todo(self) -> int:
        """The number of tokens that a step could compute now."""

    @property
    @abstractmethod
    def decoding(self) -> bool:
        """True when one computed token gives the next token of the answer."""

    @property
    @abstractmethod
    def takes_cached(self) -> bool:
        """True when the request can use cached blocks of its prompt."""

    @property
    @abstractmethod
    def scores_prompt(self) -> bool:
        """True when the next tokens are computed for the log probabilities of the prompt."""

    @abstractmethod
    def samples(self, count: int) -> bool:
        """Return whether a token is sampled after the next `count` ones."""

    @abstractmethod
    def row_request(self, count: int) -> RowRequest | None:
        """Return what the row of the next `count` tokens requests besides sampling."""

    def draft(self, most: int, prefill_budget: int) -> Draft:
        """Return at most `most` tokens that may follow the next one to be computed; none when there is no guess. The
        draft model may compute `prefill_budget` tokens for it."""
        return NO_DRAFT

    def take_sampled(self, sampled: list[Sampled]) -> FinishReason | None:
        """Append tokens up to the one that ends the answer, if one does, remove those behind it from the list, and
        return why the answer ends."""
        for count, token in enumerate(sampled, 1):
            self.tokens.append(token.token_id)
            finish = self.finish_after(token.token_id)
            if finish is not None:
                del sampled[count:]
                return finish
        return None

    def settle_draft(self, row: Row, num_sampled: int, *, holds_still: bool) -> None:
        """Take in that so many of the tokens sampled in a row with a draft hold. What was computed behind them is
        computed again; a request that was preempted meanwhile computes everything again."""
        self.drafted = 0
        if holds_still:
            self.computed -= row.count - num_sampled
            self.draft_computed = min(self.draft_computed, self.computed)

    def take_draft_prefill(self, prefill: DraftPrefill, row: Row, num_sampled: int) -> None:
        """Take in that the draft model has computed tokens, and of those that it drafted all that were right but the
        last, which it has not read."""
        stop = prefill.stop + max(0, min(len(row.draft), num_sampled) - 1)
        for block in self.blocks[prefill.start // self.block_size : stop // self.block_size]:
            block.drafted = True

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def take_output(self, row: Row, output: RowOutput) -> None:
        """Append the log probabilities that did not arrive before a preemption already."""
        self.prompt_logprobs += output.logprobs[len(self.prompt_logprobs) - row.start :]

    def completes_stage(self, row: Row) -> bool:
        """Return whether the request goes on to another stage after this row."""
        return False

    def end_stage(self) -> None:
        """Close this stage; the request goes on in the next one."""
        self.ended = True

    def finish_after(self, token_id: int) -> FinishReason | None:
        """Return why the answer ends with this token, the last one known; None: it does not."""
        if token_id in self.request.stop_token_ids and self.num_output > self.request.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.limit else None


class TokenCursor(RowCursor):
    """A request for tokens."""

    def __init__(
        self, request: Request, max_model_len: int, block_size: int, arrival: int = 0, arrived_at: float = 0.0,
        *, speculates: bool = False, has_draft_model: bool = False,
    ) -> None:  # fmt: skip
        prompt, max_tokens = request.prompt_token_ids, request.params.max_tokens
        wanted = max_model_len if max_tokens is None else len(prompt) + max_tokens
        tokens = [*prompt, *request.output_token_ids]
        limit = min(max_model_len, wanted)
        super().__init__(request, tokens, len(prompt), limit, block_size, arrival, arrived_at)
        self.drafter: Drafter | None = None
        if speculates:
            # The draft model has embeddings of its own: it cannot read a prompt's rows.
            uses_model = has_draft_model and not request.params.prediction and not request.embeds
            self.drafter = ModelDrafter(tokens) if uses_model else NgramDrafter(tokens, _predicted(request))

    @property
    def known(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def scarce_resource(self) -> ScarceResource | None:
        if self.request.embeds:
            return ScarceResource.PROMPT_EMBEDS
        return None if self.request.params.prompt_logprobs is None else ScarceResource.PROMPT_LOGPROBS

    def can_begin(self, prompt_logprobs_budget: int, memory: ImageMemory) -> bool:
        if self.request.embeds and not self.tensor_bytes:
            return memory.has_bytes_for(self.request)
        return not self.scores_prompt or prompt_logprobs_budget > 0

    def enter_row(self, row: int, memory: ImageMemory, now: float) -> None:
        super().enter_row(row, memory, now)
        if self.request.embeds and not self.tensor_bytes:
            self.tensor_bytes = self.request.tensor_bytes
            memory.client_bytes += self.tensor_bytes

    @property
    def todo(self) -> int:
        """The number of known tokens that are not computed; the last token of a full answer is never computed."""
        return 0 if self.known >= self.limit else self.known - self.computed

    @property
    def decoding(self) -> bool:
        """True when `todo` is 1 and the token is not a prompt of one token. It is read for every running request in
        every step, so it does not call `todo`."""
        known = len(self.tokens) + self.pending
        return known - self.computed == 1 and self.computed > 0 and known < self.limit

    @property
    def takes_cached(self) -> bool:
        return not self.scores_prompt

    @property
    def scores_prompt(self) -> bool:
        """True until the first token is sampled: the prompt's log probabilities are delivered with it."""
        return (
            self.request.params.prompt_logprobs is not None
            and len(self.tokens) == self.num_prompt
            and self.computed < self.num_prompt - 1
        )

    def samples(self, count: int) -> bool:
        return self.computed + count == self.known

    def row_request(self, count: int) -> RowRequest | None:
        num_top = self.request.params.prompt_logprobs
        return PromptLogprobs(num_top) if num_top is not None and self.scores_prompt else None

    def draft(self, most: int, prefill_budget: int) -> Draft:
        """Return a draft of no more tokens than the answer may still have behind the one that is sampled anyway. A
        draft model that is far behind catches up first, in several steps."""
        if self.drafter is None:
            return NO_DRAFT
        tokens = self.drafter.draft(self.pending, min(most, self.limit - self.known - 1))
        if tokens[:1] != [TO_DRAFT]:
            return Draft(tokens)
        behind = self.computed + 1 - self.draft_computed
        count = min(behind, prefill_budget)
        return Draft(tokens if count == behind else [], DraftPrefill(self.draft_computed, count) if count else None)

    def settle_draft(self, row: Row, num_sampled: int, *, holds_still: bool) -> None:
        super().settle_draft(row, num_sampled, holds_still=holds_still)
        if self.drafter is not None:
            self.drafter.learn(len(row.draft), num_sampled - 1)


class EncodeCursor(RowCursor):
    """A request, or a stage, that computes the hidden states of a prompt and samples nothing."""

    encodes: ClassVar[bool] = True

    def __init__(
        self, request: Request, token_ids: Sequence[int], block_size: int, arrival: int, arrived_at: float
    ) -> None:
        num_prompt = len(token_ids)
        super().__init__(request, list(token_ids), num_prompt, num_prompt, block_size, arrival, arrived_at)

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
        """False: the prefix cache does not keep hidden states."""
        return False

    @property
    def scores_prompt(self) -> bool:
        return False

    def samples(self, count: int) -> bool:
        return False


class PoolCursor(EncodeCursor):
    """A request for an embedding of its prompt."""

    def __init__(
        self, request: Request, pooling: Pooling, block_size: int, arrival: int = 0, arrived_at: float = 0.0
    ) -> None:
        super().__init__(request, request.prompt_token_ids, block_size, arrival, arrived_at)
        self.pooling = pooling

    @property
    def takes_cached(self) -> bool:
        return self.pooling is Pooling.LAST

    def row_request(self, count: int) -> RowRequest | None:
        is_end = self.computed + count == self.num_prompt
        return Pooled(self.pooling, is_end) if is_end or self.pooling is Pooling.MEAN else None


class PromptEmbedsCursor(EncodeCursor):
    """A stage of an image: one of its prompts is encoded, and its hidden states stay in the worker."""

    def __init__(self, denoise_cursor: DenoiseCursor, slot: EmbedsSlot, key: PromptKey, block_size: int) -> None:
        request = denoise_cursor.request
        super().__init__(request, key.token_ids, block_size, denoise_cursor.arrival, denoise_cursor.arrived_at)
        self.denoise_cursor: DenoiseCursor = denoise_cursor
        self.slot = slot
        self.preemptions = denoise_cursor.preemptions

    @property
    def needs_row(self) -> bool:
        """False when the prompt was encoded, or is being encoded, for another image while this one waited."""
        return self.slot.needs_encoding

    def begin(self, memory: ImageMemory, now: float) -> None:
        self.ended = True

    def enter_row(self, row: int, memory: ImageMemory, now: float) -> None:
        super().enter_row(row, memory, now)
        self.slot.is_being_encoded = True

    def leave_row(self) -> None:
        super().leave_row()
        self.slot.is_being_encoded = False

    def preempted(self) -> None:
        super().preempted()
        self.denoise_cursor.preemptions = self.preemptions

    def row_request(self, count: int) -> RowRequest | None:
        return KeptHiddenStates(self.slot.slot, self.computed + count == self.num_prompt)

    def completes_stage(self, row: Row) -> bool:
        return row.start + row.count == self.known

    def end_stage(self) -> None:
        super().end_stage()
        self.slot.is_complete = True

    def next_stage(self, memory: ImageMemory, limits: Limits) -> Cursor:
        return self.denoise_cursor.next_stage(memory, limits)


class DenoiseCursor(Cursor):
    """The last stage of an image, and what the image holds from its admission to its end: a latent slot and the slots
    of its prompt embeds. It has neither a row nor blocks: preempting it means not planning it, and loses nothing."""

    def __init__(
        self, request: Request, image: ImageParams, cost: int, arrival: int = 0, arrived_at: float = 0.0
    ) -> None:
        super().__init__(request, 0, arrival, arrived_at)
        self.denoise_cursor: DenoiseCursor = self
        self.image = image
        self._step_cost = cost
        self.units: list[Denoise] = []
        """Its work, from its admission on."""
        self.latent_slot = -1
        """The latent slot in the worker; -1 while the image waits for one."""
        self.embeds: EmbedsPair = None, None
        self.since = 0.0
        """The time at which its present stage began."""
        self.is_begun = False
        """True when a plan has admitted it to the worker."""
        self.done = 0
        """Units whose results have arrived."""

    @property
    def known(self) -> int:
        return len(self.units)

    @property
    def todo(self) -> int:
        return len(self.units) - self.computed

    @property
    def next_unit(self) -> Denoise:
        return self.units[self.computed]

    @property
    def cost(self) -> int:
        """Tokens that its next unit counts as; all steps of a whole image count as one."""
        return self.next_unit.cost // max(1, self.next_unit.count)

    @property
    def ends_step(self) -> bool:
        """False when the newest unit to arrive ends no step: it encoded a prompt, or the latents after the step are
        decoded next."""
        is_last = self.done == len(self.units)
        return self.units[self.done - 1].stage != "encode" and (is_last or self.units[self.done].stage != "decode")

    @property
    def scarce_resource(self) -> ScarceResource | None:
        return ScarceResource.CLIENT_TENSORS if self.request.conditioning.num_bytes else ScarceResource.LATENT_SLOT

    def can_begin(self, prompt_logprobs_budget: int, memory: ImageMemory) -> bool:
        return memory.has_capacity_for(self.request)

    def begin(self, memory: ImageMemory, now: float) -> None:
        self.latent_slot, self.embeds = memory.take(self.request)
        assert memory.limits is not None
        self.units = _units_of(self.request, self.image, self.latent_slot, self._step_cost, memory.limits)
        self.since = now
        self.queue_seconds = now - self.arrived_at

    def release(self, memory: ImageMemory) -> None:
        """Give back what the image holds, if it was admitted."""
        if self.latent_slot >= 0:
            memory.give_back(self.request, self.latent_slot, self.embeds)
        self.latent_slot, self.embeds = -1, (None, None)

    def next_stage(self, memory: ImageMemory, limits: Limits) -> Cursor:
        for stage in stages_of(self.request, limits) if self.missing else ():
            if isinstance(stage, EncodePrompt) and (slot := memory.embeds.by_key[stage.key]).needs_encoding:
                return PromptEmbedsCursor(self, slot, stage.key, limits.block_size)
        return self

    @property
    def missing(self) -> list[EmbedsSlot]:
        """Its prompt embeds that are not complete."""
        return [slot for slot in self.embeds if slot is not None and not slot.is_complete]

    @property
    def awaits_embeds(self) -> bool:
        """True when rows of other images encode everything that is missing."""
        return bool(self.missing) and all(slot.is_being_encoded for slot in self.missing)

    def admission(self) -> DenoiseAdmission:
        prompt, negative = (PlacedEmbeds() if slot is None else slot.placed for slot in self.embeds)
        request = self.request
        return DenoiseAdmission(
            self.latent_slot, self.image, prompt, negative, self.id, request.conditioning, request.checkpoint
        )


def _units_of(request: Request, image: ImageParams, slot: int, cost: int, limits: ImageLimits) -> list[Denoise]:
    """Return the work of an image in a latent slot: the prompts that its pipeline encodes, the steps that are left, and
    the decodings. Images of different slots have their checkpoints after different steps, so that no step has many."""
    embeds_of_client = (
        (request.conditioning.prompt, request.conditioning.negative)[: image.passes] if limits.reads_text else ()
    )
    units = [
        Denoise(slot, number, 0, limits.encode_cost, False, "encode")
        for number, embeds in enumerate(embeds_of_client)
        if embeds is None
    ]
    start, last, every = 0, image.steps, limits.checkpoint_steps
    if request.checkpoint is not None:
        start = request.checkpoint.step
    for end in [last] if limits.whole_images else range(start + 1, last + 1):
        is_shown = end == last or (image.preview_every > 0 and end % image.preview_every == 0)
        is_kept = every > 0 and end != last and (end + slot) % every == 0
        is_apart = is_shown and limits.decode_cost > 0 and not limits.whole_images
        count = end - start
        units.append(
            Denoise(slot, start, count, cost * count, is_shown and not is_apart, "denoise", is_kept and not is_apart)
        )
        if is_apart:
            units.append(Denoise(slot, end, 0, limits.decode_cost, True, "decode", is_kept))
        start = end
    return units


def _predicted(request: Request) -> list[int]:
    """Return the text that an answer is expected to repeat, behind the end of its prompt, where the answer begins."""
    prediction = request.params.prediction
    return [*request.prompt_token_ids[-LONGEST_MATCH:], *prediction] if prediction else []


def needs_row(cursor: Cursor) -> TypeGuard[RowCursor]:
    """Return whether the cursor's stage is computed in a row of the worker."""
    return isinstance(cursor, RowCursor) and cursor.needs_row


def first_cursor(request: Request, limits: Limits, arrival: int, arrived_at: float) -> Cursor:
    """Return the cursor that a request waits for admission with."""
    match stages_of(request, limits)[-1]:
        case PoolPrompt(pooling=pooling):
            return PoolCursor(request, pooling, limits.block_size, arrival, arrived_at)
        case DenoiseStage(image=image, cost=cost):
            return DenoiseCursor(request, image, cost, arrival, arrived_at)
    speculative = request.params.speculative
    return TokenCursor(
        request,
        limits.max_model_len,
        limits.block_size,
        arrival,
        arrived_at,
        speculates=limits.speculates or bool(request.params.prediction) if speculative is None else speculative,
        has_draft_model=limits.has_draft_model,
    )
