"""A worker made of dictionaries: it believes the plan and nothing else, and notices every lie in it.

Each cache slot holds the digest of the whole prefix up to its token. A token is sampled from the digests that
attention would read, so a stale, foreign or missing slot changes the output. An image's latents are the digest of
its texts and of every step so far; as in the real worker those of the last steps are kept, and no more.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace

from weft.payloads import Conditioning, DeclaredInput, EmbedsSegment, PromptEmbeds
from weft.plan import (
    TO_DRAFT,
    Denoise,
    DenoiseAdmission,
    DenoiseOutput,
    ImageLimits,
    KeptHiddenStates,
    Limits,
    Pooled,
    PromptLogprobs,
    Row,
    RowOutput,
    Sampled,
    StepPlan,
    StepResult,
    accepted,
)
from weft.scheduler.cursors import TokenCursor
from weft.scheduler.integrity import check_integrity
from weft.scheduler.scheduler import Scheduler
from weft.types import (
    Event,
    ImageParams,
    LatentCheckpoint,
    MixedPrompt,
    Pooling,
    Request,
    SamplingParams,
    StepEvents,
    TokenLogprob,
)

VOCAB = 50
STOP_TOKEN = 7
KEPT_LATENTS = 3
SIZE = 8
EMBEDS = DeclaredInput(stage="encode", shape=(12, 2), fewer_rows=True)


def limits(**changes: object) -> Limits:
    defaults = {
        "num_blocks": 33,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_prefill_chunk": 16,
        "logits_width": VOCAB,
    }
    chosen = defaults | changes
    return Limits(**({"max_mixed_prefill": chosen["max_prefill_chunk"]} | chosen))


def image_limits(**changes: object) -> ImageLimits:
    defaults = {
        "width": SIZE,
        "height": SIZE,
        "num_tokens": 4,
        "max_prompt_tokens": 12,
        "inputs": {"prompt_embeds": EMBEDS, "negative_prompt_embeds": EMBEDS},
        "latent_slot_bytes": 100,
        "embeds_bytes": 10,
        "max_num_images": 3,
        "max_mixed_denoise": 8,
    }
    chosen = defaults | changes
    num_images = chosen["max_num_images"]
    chosen.setdefault("max_num_embeds", 2 * num_images)
    slots = num_images * chosen["latent_slot_bytes"] + chosen["max_num_embeds"] * chosen["embeds_bytes"]
    return ImageLimits(**({"max_embedding_bytes": slots + 100} | chosen))


def embeds(*values: int) -> PromptEmbeds:
    """Hidden states that a client sent: two values a row, of two bytes each."""
    data = struct.pack(f"<{len(values)}e", *values)
    return PromptEmbeds(data=memoryview(data), shape=(len(values) // 2, 2), dtype="float16")


def drawing(
    name: str,
    prompt: Sequence[int] = (1, 2, 3),
    steps: int = 5,
    *,
    guidance: float = 2.0,
    negative: Sequence[int] = (),
    sampler: str = "euler",
    preview_every: int = 0,
    seed: int = 0,
    size: int = SIZE,
    given: PromptEmbeds | None = None,
    negative_given: PromptEmbeds | None = None,
    text: str = "",
    negative_text: str = "",
    checkpoint: LatentCheckpoint | None = None,
    **details: object,
) -> Request:
    """A request for an image; with `text`, of a model that reads text."""
    image = ImageParams(
        width=size,
        height=size,
        steps=steps,
        guidance_scale=guidance,
        seed=seed,
        sampler=sampler,
        negative_token_ids=list(negative),
        preview_every=preview_every,
        prompt_text=text,
        negative_text=negative_text,
    )
    texts = Conditioning(prompt=given, negative=negative_given)
    asked = request(name, [] if given or text else list(prompt), 1, **details)
    return replace(asked, image=image, conditioning=texts, checkpoint=checkpoint)


def request(
    name: str,
    prompt: list[int] | MixedPrompt,
    max_tokens: int | None = 8,
    *,
    salt: str = "",
    stop: bool = False,
    output: Sequence[int] = (),
    priority: int = 0,
    tenant: str = "",
    sibling_of: str = "",
    pooling: Pooling | None = None,
    **params: object,
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt.token_ids if isinstance(prompt, MixedPrompt) else prompt,
        embeds=prompt.embeds if isinstance(prompt, MixedPrompt) else [],
        params=SamplingParams(seed=0, max_tokens=max_tokens, **params),
        stop_token_ids=[STOP_TOKEN] if stop else [],
        output_token_ids=list(output),
        cache_salt=salt,
        priority=priority,
        tenant=tenant,
        sibling_of=sibling_of,
        pooling=pooling,
    )


def events_of(brought: StepEvents) -> list[Event]:
    """Return what a step brought as events, those of plain tokens too."""
    plain = [Event(request_id=request_id, token_ids=[token]) for request_id, token in brought.tokens.items()]
    return plain + brought.events


def contents(token_ids: Sequence[int], embeds: Sequence[EmbedsSegment]) -> list[int]:
    """What a model reads: token ids, and for rows of prompt embeds numbers that no token has."""
    read = list(token_ids)
    for segment in embeds:
        data, size = bytes(segment.embeds.data), segment.embeds.data.nbytes // segment.embeds.shape[0]
        for row in range(segment.embeds.shape[0]):
            values = hashlib.blake2b(data[row * size : row * size + size], digest_size=3).digest()
            read[segment.start + row] = VOCAB + int.from_bytes(values, "little")
    return read


def digest(parent: bytes, token: int) -> bytes:
    return hashlib.blake2b(parent + token.to_bytes(4, "little"), digest_size=8).digest()


def next_token(tokens: list[int]) -> int:
    """What the simulated model answers to a sequence: any two sequences differ, as far as digests go."""
    prefix = b""
    for token in tokens:
        prefix = digest(prefix, token)
    return prefix[0] % VOCAB


def expected_output(request: Request, max_model_len: int) -> list[int]:
    """The whole answer of an undisturbed run: what a request already has, and what is still to come."""
    num_prompt = len(request.prompt_token_ids)
    tokens = contents([*request.prompt_token_ids, *request.output_token_ids], request.embeds)
    limit = min(max_model_len, num_prompt + (request.params.max_tokens or max_model_len))
    while len(tokens) < limit:
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_token_ids and len(tokens) - num_prompt > request.params.min_tokens:
            break
    return tokens[num_prompt:]


def score(token: int, position: int) -> TokenLogprob:
    """The simulated log probability of a token of a prompt."""
    return TokenLogprob(-token - position / 1000)


def expected_vector(request: Request) -> bytes:
    """The simulated vector of a prompt: its digest, and what it is of."""
    seen = b""
    for token in request.prompt_token_ids:
        seen = digest(seen, token)
    assert request.pooling is not None
    return seen + request.pooling.encode()


def text_of(tokens: Sequence[int]) -> bytes:
    seen = b""
    for token in tokens:
        seen = digest(seen, token)
    return seen


def denoised(latents: bytes, step: int) -> bytes:
    return hashlib.blake2b(latents + step.to_bytes(4, "little"), digest_size=8).digest()


def first_latents(image: ImageParams, text: bytes, negative: bytes) -> bytes:
    described = f"{image.seed} {image.guidance_scale} {image.sampler} {image.steps}".encode()
    return hashlib.blake2b(described + text + b"|" + negative, digest_size=8).digest()


def prompts_of(request: Request) -> tuple[bytes, bytes]:
    """What the two prompts of an image are encoded to."""
    image, given = request.image, request.conditioning
    assert image is not None
    prompt = image.prompt_text.encode() or text_of(request.prompt_token_ids)
    negative = image.negative_text.encode() or text_of(image.negative_token_ids)
    prompt = bytes(given.prompt.data) if given.prompt else prompt
    return prompt, bytes(given.negative.data) if given.negative else negative


def expected_images(request: Request) -> dict[int, bytes]:
    """What an undisturbed run shows, by the number of steps done."""
    image = request.image
    assert image is not None
    text, negative = prompts_of(request)
    latents = first_latents(image, text, negative if image.guidance_scale != 1 else b"")
    shown = {}
    for step in range(image.steps):
        latents = denoised(latents, step)
        done = step + 1
        if done == image.steps or (image.preview_every and done % image.preview_every == 0):
            shown[done] = latents
    return shown


class Oracle:
    """A drafter that knows the whole answer: its drafts are right up to a random place, behind which they are not."""

    def __init__(self, tokens: list[int], whole: list[int], rnd: random.Random) -> None:
        self.tokens = tokens
        self.whole = whole
        self.rnd = rnd
        self.accepted: list[int] = []

    def draft(self, pending: int, most: int) -> list[int]:
        first = len(self.tokens) + pending
        length, right = self.rnd.randint(0, max(0, min(most, 12))), self.rnd.randint(0, 12)
        truth = [*self.whole[first : first + right], *[self.rnd.randrange(VOCAB) for _ in range(length)]]
        return truth[:length]

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted > 0
        self.accepted.append(num_accepted)


class SimulatedWorker:
    def __init__(self, block_size: int, *, reads_text: bool = False) -> None:
        self.block_size = block_size
        self.reads_text = reads_text
        self.rows: dict[int, tuple[list[int], list[int]]] = {}
        self.slots: dict[int, bytes] = {}
        self.draft_slots: dict[int, bytes] = {}
        """The same of the draft model."""
        self.draft_prefilled = 0
        self.pooled: dict[int, int] = {}
        """Of each row whose hidden states are summed up: how many are."""
        self.computed = 0
        self.largest_batch = 0
        self.broken: set[int] = set()
        """Token ids that make the logits of every sequence they stand in no numbers."""
        self.embeds: dict[int, dict[int, bytes]] = {}
        """By slot: the digest after each token, or after the last one all that a client sent."""
        self.encoded: list[int] = []
        """Tokens of every prompt that was encoded to its end."""
        self.images: dict[int, tuple[DenoiseAdmission, tuple[bytes, bytes], dict[int, bytes]]] = {}
        """By latent slot: with its prompt embeds, and the latents after so many steps."""
        self.texts: dict[int, dict[int, bytes]] = {}
        """By latent slot: the prompts that a text encoder has encoded, by number."""
        self.broken_seeds: set[int] = set()
        self.denoised = 0

    def execute(self, plan: StepPlan) -> StepResult:
        for row in plan.release:
            del self.rows[row]
        for slot in plan.release_slots:
            self.images.pop(slot, None)
        assert plan.rows or plan.denoise, "an empty step"
        for admission in plan.admit:
            assert admission.row not in self.rows, "a row was given to two requests"
            self.rows[admission.row] = (contents(admission.token_ids, admission.embeds), [])
        assert len({row.row for row in plan.rows}) == len(plan.rows), "a row is planned twice"
        self.largest_batch = max(self.largest_batch, len(plan.rows))
        sampled, row_outputs = [], []
        for row in plan.rows:
            tokens, blocks = self.rows[row.row]
            blocks += row.new_blocks
            draft = self._drafted(row, tokens, blocks)
            if draft:
                sampled.append(accepted(draft, self._verify(row, draft, tokens, blocks)))
                continue
            assert row.count > 0 and row.start + row.count <= len(tokens), "the plan asks for tokens nobody knows"
            for position in range(row.start, row.start + row.count):
                before = self._read(blocks, position - 1) if position else b""
                self.slots[self._slot(blocks, position)] = digest(before, tokens[position])
            self.computed += row.count
            if row.samples:
                assert row.start + row.count == len(tokens), "the plan samples in the middle of a sequence"
                seen = b""
                for position, token in enumerate(tokens):
                    seen = digest(seen, token)
                    assert self._read(blocks, position) == seen, "attention would read a slot of somebody else"
                token = seen[0] % VOCAB
                tokens.append(token)
                broken = self.broken.intersection(tokens[:-1])
                sampled.append([Sampled(-1, error="not a number") if broken else Sampled(token)])
            if row.request is not None:
                broken = self.broken.intersection(tokens[: row.start + row.count])
                row_outputs.append(RowOutput(error="not a number") if broken else self._row_output(row))
        for admission in plan.admit_images:
            self._begin(admission)
        assert len({one.slot for one in plan.denoise}) == len(plan.denoise), "an image is planned twice"
        return StepResult(plan.step_id, sampled, row_outputs, [self._denoise(one) for one in plan.denoise])

    def _drafted(self, row: Row, tokens: list[int], blocks: list[int]) -> list[int]:
        """Return the row's draft. The draft model's cache is checked as the model's own is; its guesses are right, but
        for some."""
        prefill, draft = row.draft_prefill, list[int]()
        if prefill is None:
            assert TO_DRAFT not in row.draft
            return row.draft
        assert prefill.count > 0 and prefill.stop <= row.start + 1 <= len(tokens), "a guess is computed for a fact"
        assert not row.draft or (prefill.stop == row.start + 1 and set(row.draft) == {TO_DRAFT})
        self.draft_prefilled += prefill.count
        for position in range(prefill.start, prefill.stop + max(0, len(row.draft) - 1)):
            known = [*tokens[: row.start + 1], *draft]
            before = self.draft_slots[self._slot(blocks, position - 1)] if position else b""
            assert before == text_of(known[:position]), "the draft model would read a slot of somebody else"
            seen = self.draft_slots[self._slot(blocks, position)] = digest(before, known[position])
            if position >= row.start and row.draft:
                draft.append((seen[0] + (seen[1] % 8 == 0)) % VOCAB)
        assert len(draft) == len(row.draft)
        return draft

    def _verify(self, row: Row, draft: list[int], tokens: list[int], blocks: list[int]) -> list[Sampled]:
        """Compute a row's last token and its draft, and keep the tokens that hold."""
        assert row.start + 1 == len(tokens), "a draft follows something else than the last token"
        assert row.samples and row.request is None and row.count == 1 + len(draft), "a draft beside other work"
        computed = tokens + draft
        for position in range(row.start, len(computed)):
            self.slots[self._slot(blocks, position)] = digest(self._read(blocks, position - 1), computed[position])
        self.computed += row.count
        sampled, seen, holds = [], b"", True
        for position, token in enumerate(computed):
            seen = digest(seen, token)
            assert self._read(blocks, position) == seen, "attention would read a slot of somebody else"
            if position < row.start:
                continue
            broken = self.broken.intersection(computed[: position + 1])
            holds = holds and (position == row.start or (token == sampled[-1].token_id and not broken))
            sampled.append(Sampled(-1, error="not a number") if broken else Sampled(seen[0] % VOCAB))
            if holds:
                tokens.append(sampled[-1].token_id)
        return sampled

    def _begin(self, admission: DenoiseAdmission) -> None:
        for text in (admission.prompt, admission.negative):
            if text.embeds is not None:
                assert len(text.embeds.data) == text.length * 4
                self.embeds[text.slot] = {text.length - 1: bytes(text.embeds.data)}
            else:
                assert not text.length or len(self.embeds[text.slot]) == text.length, "incomplete prompt embeds"
        given = admission.conditioning
        sent = [bytes(embeds.data) if embeds else None for embeds in (given.prompt, given.negative)]
        self.texts[admission.slot] = {number: data for number, data in enumerate(sent) if data is not None}
        texts = (b"", b"") if self.reads_text else self._embeds_of(admission)
        latents = first_latents(admission.image, *texts)
        if admission.checkpoint is not None:
            latents = admission.checkpoint.latents
        self.images[admission.slot] = admission, texts, {admission.first_step: latents}

    def _embeds_of(self, admission: DenoiseAdmission) -> tuple[bytes, bytes]:
        text, negative = (
            self.embeds[text.slot][text.length - 1] if text.slot >= 0 else b""
            for text in (admission.prompt, admission.negative)
        )
        return text, negative

    def _denoise(self, one: Denoise) -> DenoiseOutput:
        admission, texts, latents = self.images[one.slot]
        image = admission.image
        if one.stage == "encode":
            assert self.reads_text and one.start < image.passes and len(latents) == 1, "a prompt is encoded too late"
            self.texts[one.slot][one.start] = (image.prompt_text, image.negative_text)[one.start].encode()
            return DenoiseOutput()
        if one.stage == "decode":
            assert one.wants_image and not one.count
            return self._shown(one, latents[one.start])
        if self.reads_text:
            encoded = self.texts[one.slot]
            assert encoded.keys() >= set(range(image.passes)), "a prompt is not encoded yet"
            if one.start == 0:
                latents[0] = first_latents(image, *(encoded.get(i, b"") if i < image.passes else b"" for i in (0, 1)))
        else:
            assert self._embeds_of(admission) == texts, "prompt embeds were overwritten that an image uses"
        assert one.count > 0 and one.start + one.count <= image.steps, "the plan asks for steps nobody asked for"
        here = latents[one.start]
        for step in range(one.start, one.start + one.count):
            here = denoised(here, step)
        end = one.start + one.count
        latents[end] = here
        latents.pop(end - KEPT_LATENTS, None)
        self.denoised += one.count
        if image.seed in self.broken_seeds:
            return DenoiseOutput(error="not a number")
        return self._shown(one, here)

    def _shown(self, one: Denoise, latents: bytes) -> DenoiseOutput:
        return DenoiseOutput(latents if one.wants_image else None, latents if one.wants_checkpoint else None)

    def _row_output(self, row: Row) -> RowOutput:
        tokens, blocks = self.rows[row.row]
        stop = row.start + row.count
        match row.request:
            case PromptLogprobs():
                positions = range(row.start + 1, stop + 1 - row.samples)
                return RowOutput([score(tokens[position], position) for position in positions])
            case Pooled(pooling=pooling, is_end=is_end):
                assert not row.samples
                if pooling is Pooling.MEAN:
                    assert row.start == 0 or self.pooled[row.row] == row.start, "tokens are missing in the mean"
                    self.pooled[row.row] = stop
                assert is_end == (stop == len(tokens))
                return RowOutput(vector=self._read(blocks, stop - 1) + pooling.encode()) if is_end else RowOutput()
            case KeptHiddenStates(slot=slot, is_end=is_end):
                assert not row.samples and is_end == (stop == len(tokens))
                text = {} if row.start == 0 else self.embeds[slot]
                self.embeds[slot] = text | {i: self._read(blocks, i) for i in range(row.start, stop)}
                self.encoded += [len(tokens)] * is_end
                return RowOutput()
        raise AssertionError("an unknown row request")

    def _slot(self, blocks: list[int], position: int) -> int:
        block = blocks[position // self.block_size]
        assert block != 0, "a token was written to the null block"
        return block * self.block_size + position % self.block_size

    def _read(self, blocks: list[int], position: int) -> bytes:
        return self.slots[self._slot(blocks, position)]


class Simulation:
    """A scheduler and a worker, in lock step or with results `delay` steps late; integrity after every step."""

    def __init__(self, limits: Limits, delay: int = 0) -> None:
        self.scheduler = Scheduler(limits)
        reads_text = limits.image is not None and limits.image.reads_text
        self.worker = SimulatedWorker(limits.block_size, reads_text=reads_text)
        self.delay = delay
        self.under_way: deque[tuple[StepPlan, StepResult]] = deque()
        self.plans: list[StepPlan] = []
        self.owners: list[dict[int, str]] = []
        """For each plan: whose row is whose."""
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, Event] = {}
        self.events: list[Event] = []
        self.shown: dict[str, dict[int, bytes]] = {}
        """Of each image: what was shown, by the number of steps done."""
        self.progress: dict[str, list[int]] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.outputs[request.request_id] = []

    def foresee(self, asked: Request, rnd: random.Random) -> None:
        """Draft for a request that has been added, often rightly."""
        cursor = self.scheduler.cursors[asked.request_id]
        if isinstance(cursor, TokenCursor):
            whole = expected_output(asked, self.scheduler.limits.max_model_len)
            cursor.drafter = Oracle(cursor.tokens, asked.prompt_token_ids + whole, rnd)

    def abort(self, name: str) -> bool:
        known = self.scheduler.abort(name)
        check_integrity(self.scheduler)
        return known

    def step(self) -> bool:
        """False when there is nothing left to do."""
        plan = self.scheduler.schedule()
        check_integrity(self.scheduler)
        if plan is not None:
            self.plans.append(plan)
            self.owners.append({cursor.row: cursor.id for cursor in self.scheduler.running})
            self.under_way.append((plan, self.worker.execute(plan)))
        if self.under_way and (plan is None or len(self.under_way) > self.delay):
            for event in events_of(self.scheduler.apply(*self.under_way.popleft())):
                self.events.append(event)
                assert event.request_id not in self.ends, "a request went on after its end"
                self.outputs[event.request_id] += event.token_ids
                if event.denoise_step is not None:
                    self.progress.setdefault(event.request_id, []).append(event.denoise_step)
                    if event.image is not None:
                        self.shown.setdefault(event.request_id, {})[event.denoise_step] = event.image
                if event.finish is not None:
                    self.ends[event.request_id] = event
            check_integrity(self.scheduler)
            return True
        return plan is not None

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                assert not self.scheduler.has_work, "the scheduler gave up with requests open"
                return
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.cursors}")

    def rows_of(self, name: str) -> list[Row]:
        """Everything that was planned for a request, in order."""
        return [
            row
            for plan, owners in zip(self.plans, self.owners, strict=True)
            for row in plan.rows
            if owners[row.row] == name
        ]

    def admissions(self) -> list[str]:
        """Requests in the order in which they were given rows."""
        return [
            owners[admission.row]
            for plan, owners in zip(self.plans, self.owners, strict=True)
            for admission in plan.admit
        ]


def assert_prompt_logprobs(simulation: Simulation, asked: Request) -> None:
    """Those of the whole prompt come with a request's first event if it asked, and with no other."""
    prompt = asked.prompt_token_ids
    expected = [score(token, position) for position, token in enumerate(prompt)][1:]
    came = [event.prompt_logprobs for event in simulation.events if event.request_id == asked.request_id]
    if asked.params.prompt_logprobs is not None and came:
        assert came.pop(0) == expected
    assert came == [None] * len(came)
