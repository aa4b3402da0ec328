"""The diffusion pipeline of the diffusion transformer, which uses a language model's hidden states as prompt embeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from weft.model.diffusion import flow
from weft.model.diffusion.dit import BatchInvariantDit, Dit, DitConfig, EncodedPrompts
from weft.model.diffusion.flow import Velocity
from weft.model.diffusion.pipeline import first_latents
from weft.payloads import LATENTS, NEGATIVE_PROMPT_EMBEDS, PROMPT_EMBEDS, SIGMAS, DeclaredInput
from weft.plan import DenoiseAdmission, PlacedEmbeds
from weft.types import ImageParams
from weft.worker.diffusion.denoiser import PromptEmbedsTable
from weft.worker.diffusion.dit_graphs import VelocityGraphs
from weft.worker.inputs import sent, to_device


class DitImage(NamedTuple):
    """The pipeline's state of an image."""

    params: ImageParams
    times: list[float]
    embeds: tuple[PlacedEmbeds, PlacedEmbeds]
    """The embeds of the prompt and of the negative prompt."""
    encoded: dict[int, EncodedPrompts | None]
    """The prompts that were encoded so far, by their place in `embeds`."""


class Passes(Protocol):
    """The model's passes over a batch of images."""

    def over(self, images: Sequence[DitImage], count: int) -> Velocity:
        """Return the velocity of the first `count` passes over each of these images, those with their prompts first."""


class DevicePasses:
    """Passes over all images at once, by CUDA graphs where there are any. Every pass encodes the prompts."""

    def __init__(self, model: Dit | VelocityGraphs, table: PromptEmbedsTable) -> None:
        self._model = model
        self._table = table

    def over(self, images: Sequence[DitImage], count: int) -> Velocity:
        placed = [image.embeds[number] for number in range(count) for image in images]
        columns = [one.slot for one in placed], [one.length for one in placed]
        arrays = [np.array(column, dtype=np.int64) for column in columns]
        slots, lengths = to_device(arrays, self._table.states.device)
        # An empty prompt has slot -1, which is the last one: at length 0, none of its rows count.
        embeds = self._table.states[slots]
        return lambda latents, t: self._model.velocity(latents.repeat(count, 1, 1, 1), t.repeat(count), embeds, lengths)


class BatchInvariantPasses:
    """Batch-invariant passes: an image has the same bits in every batch."""

    def __init__(self, model: Dit, table: PromptEmbedsTable) -> None:
        self._model = BatchInvariantDit(model)
        self._table = table

    def over(self, images: Sequence[DitImage], count: int) -> Velocity:
        encoded = [self._encode(image, number) for number in range(count) for image in images]
        return lambda latents, t: self._model.velocity(latents.repeat(count, 1, 1, 1), t.repeat(count), encoded)

    def _encode(self, image: DitImage, number: int) -> EncodedPrompts | None:
        if number not in image.encoded:
            placed = image.embeds[number]
            image.encoded[number] = self._model.encode(self._table.states[placed.slot, : placed.length])
        return image.encoded[number]


class DitPipeline:
    """The diffusion transformer, with Euler or Heun steps and classifier-free guidance."""

    def __init__(self, model: Dit, table: PromptEmbedsTable, graphs: VelocityGraphs | None = None) -> None:
        self.model = model
        self._table = table
        self._graphs = graphs
        on_cpu = table.states.device.type == "cpu"
        self._passes: Passes = BatchInvariantPasses(model, table) if on_cpu else DevicePasses(graphs or model, table)

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        return self.model.config.latent_shape

    @property
    def num_bytes(self) -> int:
        return sum(weight.numel() * weight.element_size() for weight in self.model.parameters())

    def prepare(self, admission: DenoiseAdmission) -> tuple[DitImage, Tensor]:
        params, config = admission.image, self.model.config
        sigmas = admission.conditioning.values(SIGMAS)
        times = flow.times(params.steps, config.shift).tolist() if sigmas is None else [*map(float, sigmas), 0.0]
        embeds = admission.prompt, admission.negative
        for placed in embeds:
            if placed.embeds is not None:
                self._table.put(placed.slot, placed.embeds)
        return DitImage(params, times, embeds, {}), first_latents(admission, config.latent_shape)

    def encode(self, image: DitImage, number: int) -> None:
        raise AssertionError("the language model encodes the prompts")

    def denoise_step(self, latents: Tensor, images: Sequence[DitImage], starts: Sequence[int], count: int) -> Tensor:
        passes, sampler = images[0].params.passes, images[0].params.sampler
        passes_over = self._passes.over(images, passes)
        spans = zip(images, starts, strict=True)
        numbers = [[image.params.guidance_scale, *image.times[start : start + count + 1]] for image, start in spans]
        scale, *t = sent(torch.tensor(numbers, dtype=torch.float32), latents.device).unbind(1)

        def velocity(latents: Tensor, t: Tensor) -> Tensor:
            found = passes_over(latents, t)
            if passes == 1:
                return found
            conditional, unconditional = found.chunk(2)
            return flow.guided(conditional, unconditional, scale)

        for i in range(count):
            latents = flow.STEPS[sampler](latents, t[i], t[i + 1], velocity)
        return latents

    def remembered(self, image: DitImage, step: int) -> list[Tensor]:
        """Return nothing: a step, also one of Heun's, depends on the latents before it alone."""
        return []

    def warm_up(self) -> bool:
        return self._graphs is not None and self._graphs.capture_next()

    def decode(self, latents: Tensor) -> Tensor:
        """Return the latents: this model has no VAE, and its latents are pixels."""
        return latents


def dit_inputs(config: DitConfig) -> dict[str, DeclaredInput]:
    """Return the inputs that the stages take from clients."""
    embeds = DeclaredInput(stage="encode", shape=(config.max_text_tokens, config.text_width), fewer_rows=True)
    return {
        PROMPT_EMBEDS: embeds,
        NEGATIVE_PROMPT_EMBEDS: embeds,
        LATENTS: DeclaredInput(stage="denoise", shape=config.latent_shape),
        SIGMAS: DeclaredInput(stage="denoise"),
    }
