"""What the scheduler promises for one step, and what the worker returns for it.

The worker hears of a request in full once, when it is admitted to a row. After that a plan carries
only what is new: how far to go, and which blocks were added.
"""

from __future__ import annotations

from msgspec import Struct

from weft.payloads import PromptEmbeds
from weft.types import ImageParams, Pooling, SamplingParams, TokenLogprob


class ImageLimits(Struct, frozen=True, kw_only=True):
    """The same for images: what the model that draws can do, and how much of it at once."""

    width: int
    height: int
    num_tokens: int
    """What an image counts as in one pass of the model."""
    max_prompt_tokens: int
    canvas_bytes: int
    """What one image holds from its admission to its end: its latents, and what else the model keeps of it."""
    max_num_images: int
    reads_text: bool = False
    """The model encodes prompts by itself: no stage does it before."""
    text_width: int = 0
    """Of the hidden states that images are drawn from; 0: from none."""
    text_bytes: int = 0
    """What those of one prompt take."""
    max_num_texts: int = 0
    """Prompts whose hidden states are kept: at least two."""
    max_mixed_denoise: int
    max_embedding_bytes: int
    """For all canvases and texts, which are allocated at the start, and for tensors of clients."""
    whole_images: bool = False
    """All steps of an image at once, with everybody waiting for it: what denoise steps are measured against."""
    single_images: bool = False
    """No two images in a step: what drawing them together is measured against."""

    @property
    def max_given_bytes(self) -> int:
        """For tensors of clients: what canvases and texts leave."""
        slots = self.max_num_images * self.canvas_bytes + self.max_num_texts * self.text_bytes
        return self.max_embedding_bytes - slots

    def cost(self, image: ImageParams) -> int:
        """Of one denoise step, in tokens of the step's budget."""
        return self.num_tokens * image.passes_per_step


class Limits(Struct, frozen=True, kw_only=True):
    """The numbers that scheduler and worker both work within, all of them resolved."""

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
    image: ImageLimits | None = None
    """None: there is no model that draws."""

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class Admission(Struct, frozen=True):
    """A request takes a row of the worker, until `StepPlan.release` names that row."""

    row: int
    token_ids: list[int]
    """Everything known: the prompt, then the tokens sampled before a preemption or a restart. The list is the
    scheduler's own, which grows when the step's result is applied."""
    num_prompt_tokens: int
    params: SamplingParams
    stop_token_ids: list[int]
    adapter: int | None = None
    """The number of its adapter, which the worker has by now."""
    request_id: str = ""


class PromptLogprobs(Struct, frozen=True):
    """The log probabilities of the prompt tokens that follow a row's tokens, and of so many of the likeliest ones."""

    num_top: int


class Pooled(Struct, frozen=True):
    """The hidden states of a prompt's tokens as one vector of length one."""

    pooling: Pooling
    """The mean is of all tokens since the row's start: the worker keeps their sum from step to step."""
    is_end: bool
    """These are the prompt's last tokens: the vector comes back."""


class Held(Struct, frozen=True):
    """The hidden states of a prompt's tokens, kept in the worker as a text that images are drawn from."""

    slot: int
    """Of the text."""
    is_end: bool
    """These are the prompt's last tokens: the text is whole."""


Extra = PromptLogprobs | Pooled | Held
"""What a row may ask of its tokens besides the next one. Steps with such a row are not as fast as others."""


class Row(Struct, frozen=True):
    """Compute the known tokens at positions start .. start + count - 1 of one row."""

    row: int
    start: int
    count: int
    new_blocks: list[int]
    """Block ids to append to the row's table before the step."""
    samples: bool
    """The last of these tokens is the last one known: sample the token that follows it."""
    extra: Extra | None = None


class PlacedText(Struct, frozen=True):
    """A text that an image is drawn from, and where it is; none at all, as it stands here."""

    slot: int = -1
    length: int = 0
    embeds: PromptEmbeds | None = None
    """Set: a client's, to be put there first. Else it was encoded there."""


class DenoiseAdmission(Struct, frozen=True):
    """An image is begun on a canvas, and goes on until `StepPlan.release_slots` names it. Its texts stay where they are
    for as long."""

    slot: int
    image: ImageParams
    text: PlacedText
    negative: PlacedText
    request_id: str = ""


class Denoise(Struct, frozen=True):
    """Make the denoise steps start .. start + count - 1 of one image: one step, or all that are left.

    The latents after earlier steps are still there, as far back as steps may be under way: a step that was planned may
    be planned again.
    """

    slot: int
    start: int
    count: int
    cost: int
    """In tokens of the step's budget."""
    shows: bool
    """The image as it is then is wanted."""


class StepPlan(Struct, frozen=True):
    step_id: int
    release: list[int]
    """Rows to forget before anything else; after a step that failed, also rows that the worker may not know."""
    admit: list[Admission]
    rows: list[Row]
    release_slots: list[int] = []
    """The same for canvases."""
    admit_images: list[DenoiseAdmission] = []
    denoise: list[Denoise] = []

    @property
    def num_tokens(self) -> int:
        """What the step counts as against its budget."""
        return sum(row.count for row in self.rows) + sum(one.cost for one in self.denoise)

    @property
    def num_requests(self) -> int:
        return len(self.rows) + len(self.denoise)


class Sampled(Struct, frozen=True):
    """What sampling gave one row; `error` instead of a token when its logits were no numbers."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str = ""


class Gained(Struct, frozen=True):
    """What a row got of the extra that it asked for; `error` when it were no numbers."""

    logprobs: list[TokenLogprob] = []
    vector: bytes | None = None
    """float32."""
    error: str = ""


class Drawn(Struct, frozen=True):
    """What a denoise step brought; `error` when the latents are no numbers."""

    image: bytes | None = None
    """Rows of RGB bytes, when it shows."""
    error: str = ""


class StepResult(Struct, frozen=True):
    step_id: int
    sampled: list[Sampled]
    """One for every row of the plan that samples, in the plan's order."""
    gained: list[Gained] = []
    """One for every row of the plan that asks for an extra, in the plan's order."""
    drawn: list[Drawn] = []
    """One for each of the plan's denoise steps, in its order."""
