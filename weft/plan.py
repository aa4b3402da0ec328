"""The plan that the scheduler makes of one step, and the result that the worker returns for it.

The worker is told of a request in full once, when it is admitted to a row. After that a plan carries only what is new:
how many tokens to compute, and which blocks were added.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from weft.payloads import Conditioning, DeclaredInput, EmbedsSegment, PipelineStage, PromptEmbeds
from weft.types import ImageParams, LatentCheckpoint, Pooling, SamplingParams, TokenLogprob


class ImageLimits(Struct, frozen=True, kw_only=True):
    """The limits of images: what the image model can do, and how much of it at once."""

    width: int
    height: int
    num_tokens: int
    """Tokens that one pass of the model over an image counts as."""
    max_prompt_tokens: int
    latent_slot_bytes: int
    """Bytes that an image holds from its admission to its end: its latents, and what else the model keeps of it."""
    max_num_images: int
    reads_text: bool = False
    """True when the model has a text encoder of its own: the language model encodes nothing for it."""
    encode_cost: int = 0
    """Tokens that the encoding of a prompt by that text encoder counts as."""
    decode_cost: int = 0
    """Tokens that the decoding of latents counts as; 0: there is no VAE, and the last step shows the image."""
    inputs: dict[str, DeclaredInput] = {}
    """The inputs that the model takes from clients."""
    checkpoint_steps: int = 0
    """Denoise steps between two checkpoints of an image; 0: there are none."""
    embeds_bytes: int = 0
    """Bytes of the prompt embeds of one prompt."""
    max_num_embeds: int = 0
    """Prompts whose embeds are kept: at least two."""
    max_mixed_denoise: int
    max_embedding_bytes: int
    """Bytes for all latent slots and prompt embeds, which are allocated at the start, and for tensors of clients."""
    whole_images: bool = False
    """True when all steps of an image are made at once, while other requests wait: the baseline of denoise steps."""
    single_images: bool = False
    """True when no two images share a step: the baseline of batched denoise steps."""

    @property
    def max_client_bytes(self) -> int:
        """Bytes for tensors of clients: what latent slots and prompt embeds leave."""
        slots = self.max_num_images * self.latent_slot_bytes + self.max_num_embeds * self.embeds_bytes
        return self.max_embedding_bytes - slots

    def cost(self, image: ImageParams) -> int:
        """Return the cost of one denoise step, in tokens of the step's budget."""
        return self.num_tokens * image.passes_per_step


class Limits(Struct, frozen=True, kw_only=True):
    """The limits that scheduler and worker both keep, with every default resolved."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int
    max_mixed_prefill: int
    logits_width: int
    enable_prefix_caching: bool = True
    max_preemptions: int = 3
    force_preempt_every: int = 0
    speculates: bool = False
    """True when requests that do not say are decoded speculatively."""
    max_speculative_tokens: int = 0
    """Tokens that the decodes of a step have at most, drafted ones among them; a step with more decodes drafts
    nothing."""
    has_draft_model: bool = False
    """True when the worker has a draft model, which drafts for requests that bring no text to draft from."""
    max_step_seconds: float = 0
    """The time that a step with prefills should take at most; 0: as long as its tokens need."""
    max_mixed_step_seconds: float = 0
    """The same for steps that decode as well and are filled up with waiting prompts."""
    image: ImageLimits | None = None
    """None: there is no image model."""
    embeds_width: int = 0
    """Values of a row of prompt embeds; 0: prompts have none."""
    max_embedding_bytes: int = 0
    """Bytes for tensors of clients where there is no image model."""

    @property
    def max_client_bytes(self) -> int:
        """Bytes for tensors of clients, of prompts and of images together."""
        return self.max_embedding_bytes if self.image is None else self.image.max_client_bytes

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class RowAdmission(Struct, frozen=True):
    """A request takes a row of the worker until `StepPlan.release` names that row."""

    row: int
    token_ids: list[int]
    """All known tokens: the prompt, then those sampled before a preemption or a restart. The list is the scheduler's
    own, which grows when the step's result is applied."""
    num_prompt_tokens: int
    params: SamplingParams
    stop_token_ids: list[int]
    adapter: int | None = None
    """The number of its LoRA adapter, which the worker has loaded by now."""
    request_id: str = ""
    embeds: list[EmbedsSegment] = []
    """Rows that the client sent in the place of token ids."""


class PromptLogprobs(Struct, frozen=True, tag=True):
    """The row returns the log probabilities of the prompt tokens that follow its tokens, and of the likeliest ones."""

    num_top: int


class Pooled(Struct, frozen=True, tag=True):
    """The row returns its prompt's hidden states, pooled into one vector of length one."""

    pooling: Pooling
    """The mean is of all tokens since the prompt's start: the worker keeps their sum from step to step."""
    is_end: bool
    """True when these are the prompt's last tokens: the vector is returned."""


class KeptHiddenStates(Struct, frozen=True, tag=True):
    """The worker keeps the hidden states of the row's tokens as the prompt embeds of images."""

    slot: int
    """The slot of the prompt embeds."""
    is_end: bool
    """True when these are the prompt's last tokens: the prompt embeds are complete."""


RowRequest = PromptLogprobs | Pooled | KeptHiddenStates
"""What a row may request of its tokens besides sampling. Steps with such a row run without CUDA graphs."""


TO_DRAFT = -1
"""The token of a draft that the worker's draft model has yet to make."""


class DraftPrefill(Struct, frozen=True):
    """The draft model computes the known tokens at positions start .. start + count - 1 of one row, as it has their
    keys and values in a cache of its own. Where the last of them is the last one known, it drafts."""

    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count


class Row(Struct, frozen=True):
    """Compute the known tokens at positions start .. start + count - 1 of one row."""

    row: int
    start: int
    count: int
    new_blocks: list[int]
    """Block ids to append to the row's table before the step."""
    samples: bool
    """True when the last of these tokens is the last one known: the token that follows it is sampled."""
    request: RowRequest | None = None
    draft: list[int] = []
    """The tokens behind the first, which are guessed: `start` is the last position known, and the tokens that follow it
    and each drafted one are sampled. All are TO_DRAFT when the draft model is to guess them."""
    draft_prefill: DraftPrefill | None = None
    """What the draft model computes before it drafts; None: it is not used."""

    @property
    def num_samples(self) -> int:
        return len(self.draft) + self.samples


class PlacedEmbeds(Struct, frozen=True):
    """The prompt embeds of an image, and their slot; by default those of an empty prompt."""

    slot: int = -1
    length: int = 0
    embeds: PromptEmbeds | None = None
    """Prompt embeds that a client sent, to be written to the slot first; None: they were encoded there."""


class DenoiseAdmission(Struct, frozen=True):
    """An image takes a latent slot until `StepPlan.release_slots` names it; its prompt embeds stay as long."""

    slot: int
    image: ImageParams
    prompt: PlacedEmbeds
    negative: PlacedEmbeds
    request_id: str = ""
    conditioning: Conditioning = Conditioning()
    checkpoint: LatentCheckpoint | None = None
    """Set: the image goes on from here."""

    @property
    def first_step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step


class Denoise(Struct, frozen=True):
    """One unit of an image's work, which a step does whole: it makes the denoise steps start .. start + count - 1, one
    step or all that are left, or encodes the prompt of number `start`, or decodes the latents after `start` steps.

    The latents before steps that are under way are kept, so a unit that was planned may be planned again.
    """

    slot: int
    start: int
    count: int
    cost: int
    """In tokens of the step's budget."""
    wants_image: bool
    """True when the image is shown after this unit, as a preview or as the result."""
    stage: PipelineStage = "denoise"
    wants_checkpoint: bool = False

    @property
    def steps_done(self) -> int:
        """Denoise steps that are made after it."""
        return 0 if self.stage == "encode" else self.start + self.count


class StepPlan(Struct, frozen=True):
    """The work of one step."""

    step_id: int
    release: list[int]
    """Rows to forget before anything else; after a step that failed, also rows that the worker may not know."""
    admit: list[RowAdmission]
    rows: list[Row]
    release_slots: list[int] = []
    """Latent slots to forget, in the same way."""
    admit_images: list[DenoiseAdmission] = []
    denoise: list[Denoise] = []

    @property
    def num_tokens(self) -> int:
        """Tokens that the step takes of its budget."""
        return sum(row.count for row in self.rows) + sum(one.cost for one in self.denoise)

    @property
    def num_requests(self) -> int:
        return len(self.rows) + len(self.denoise)


class Sampled(Struct, frozen=True):
    """The token sampled for one row, or an `error` when its logits were not numbers."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str = ""


def accepted(draft: Sequence[int], sampled: list[Sampled]) -> list[Sampled]:
    """Return the tokens that hold of those sampled after a row's last token and after each token of its draft: all
    that were sampled behind right ones. Where one is an error, the next step will come to it again."""
    count = 1
    while count < len(sampled) and sampled[count - 1].token_id == draft[count - 1] and not sampled[count].error:
        count += 1
    return sampled[:count]


class RowOutput(Struct, frozen=True):
    """The output of a row's request, or an `error` when it was not numbers."""

    logprobs: list[TokenLogprob] = []
    vector: bytes | None = None
    """float32."""
    error: str = ""


class DenoiseOutput(Struct, frozen=True):
    """The output of a unit of an image's work, or an `error` when the latents are not numbers."""

    image: bytes | None = None
    """Rows of RGB bytes, when the plan wants the image."""
    checkpoint: bytes | None = None
    """The state of the image, as `LatentCheckpoint` has it, when the plan wants one."""
    error: str = ""


class StepResult(Struct, frozen=True):
    """The results of one step."""

    step_id: int
    sampled: list[list[Sampled]]
    """For every row of the plan that samples, in the plan's order, the tokens that hold: one, and behind a draft one
    more for each drafted token that was right."""
    row_outputs: list[RowOutput] = []
    """One for every row of the plan that has a request, in the plan's order."""
    denoise_outputs: list[DenoiseOutput] = []
    """One for each unit of images in the plan, in its order."""
