"""The diffusion transformer as a painter: it draws from a language model's hidden states, which it finds by slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from weft.model.diffusion import flow
from weft.model.diffusion.dit import Dit, Reading, SteadyDit
from weft.model.diffusion.flow import Velocity
from weft.plan import DenoiseAdmission, PlacedText
from weft.types import ImageParams
from weft.worker.diffusion.denoiser import TextTable
from weft.worker.diffusion.dit_graphs import VelocityGraphs
from weft.worker.inputs import sent, to_device


class DitDrawing(NamedTuple):
    image: ImageParams
    times: list[float]
    texts: tuple[PlacedText, PlacedText]
    """Its prompt, and what it is steered away from."""
    readings: dict[int, Reading | None]
    """Of its texts by their place there, as far as they were read."""


class Passes(Protocol):
    def over(self, drawings: Sequence[DitDrawing], count: int) -> Velocity:
        """The first `count` passes over each of these images, those with their prompts first."""


class DevicePasses:
    """Of many images at once, by graphs where there are any. Texts are read with every pass."""

    def __init__(self, model: Dit | VelocityGraphs, texts: TextTable) -> None:
        self._model = model
        self._texts = texts

    def over(self, drawings: Sequence[DitDrawing], count: int) -> Velocity:
        texts = [drawing.texts[number] for number in range(count) for drawing in drawings]
        columns = [text.slot for text in texts], [text.length for text in texts]
        arrays = [np.array(column, dtype=np.int64) for column in columns]
        slots, lengths = to_device(arrays, self._texts.states.device)
        # No text at all has slot -1, which is the last one's: of length 0, none of it counts.
        text = self._texts.states[slots]
        return lambda latents, t: self._model.velocity(latents.repeat(count, 1, 1, 1), t.repeat(count), text, lengths)


class SteadyPasses:
    """Bits that company does not change."""

    def __init__(self, model: Dit, texts: TextTable) -> None:
        self._model = SteadyDit(model)
        self._texts = texts

    def over(self, drawings: Sequence[DitDrawing], count: int) -> Velocity:
        readings = [self._read(drawing, number) for number in range(count) for drawing in drawings]
        return lambda latents, t: self._model.velocity(latents.repeat(count, 1, 1, 1), t.repeat(count), readings)

    def _read(self, drawing: DitDrawing, number: int) -> Reading | None:
        if number not in drawing.readings:
            text = drawing.texts[number]
            drawing.readings[number] = self._model.read(self._texts.states[text.slot, : text.length])
        return drawing.readings[number]


class DitPainter:
    def __init__(self, model: Dit, texts: TextTable, graphs: VelocityGraphs | None = None) -> None:
        self.model = model
        self._texts = texts
        self._graphs = graphs
        on_cpu = texts.states.device.type == "cpu"
        self._passes: Passes = SteadyPasses(model, texts) if on_cpu else DevicePasses(graphs or model, texts)

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        return self.model.config.latent_shape

    @property
    def num_bytes(self) -> int:
        return sum(weight.numel() * weight.element_size() for weight in self.model.parameters())

    def prepare(self, admission: DenoiseAdmission) -> tuple[DitDrawing, Tensor]:
        image, config = admission.image, self.model.config
        times = flow.times(image.steps, config.shift).tolist()
        texts = admission.text, admission.negative
        for text in texts:
            if text.embeds is not None:
                self._texts.put(text.slot, text.embeds)
        return DitDrawing(image, times, texts, {}), flow.noise(image.seed, config.latent_shape)

    def denoise_step(
        self, latents: Tensor, drawings: Sequence[DitDrawing], starts: Sequence[int], count: int
    ) -> Tensor:
        passes, sampler = drawings[0].image.passes, drawings[0].image.sampler
        passes_over = self._passes.over(drawings, passes)
        spans = zip(drawings, starts, strict=True)
        numbers = [
            [drawing.image.guidance_scale, *drawing.times[start : start + count + 1]] for drawing, start in spans
        ]
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

    def make_ready(self) -> bool:
        return self._graphs is not None and self._graphs.capture_next()

    def decode(self, latents: Tensor) -> Tensor:
        """Its latents are the picture."""
        return latents
