"""The diffusion transformer as a painter: it draws from a language model's hidden states, which it finds by slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.model import flow
from weft.model.dit import Dit
from weft.plan import DenoiseAdmission, PlacedText
from weft.types import ImageParams
from weft.worker.dit_graphs import VelocityGraphs
from weft.worker.inputs import to_device
from weft.worker.texts import TextTable
from weft.worker.transfer import sent


class DitDrawing(NamedTuple):
    image: ImageParams
    times: list[float]
    texts: tuple[PlacedText, PlacedText]
    """Its prompt, and what it is steered away from."""


class DitPainter:
    def __init__(self, model: Dit, texts: TextTable, graphs: VelocityGraphs | None = None) -> None:
        self.model = model
        self._texts = texts
        self._graphs = graphs

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
        return DitDrawing(image, times, texts), flow.noise(image.seed, config.latent_shape)

    def denoise_step(
        self, latents: Tensor, drawings: Sequence[DitDrawing], starts: Sequence[int], count: int
    ) -> Tensor:
        passes, sampler = drawings[0].image.passes, drawings[0].image.sampler
        texts = [drawing.texts[number] for number in range(passes) for drawing in drawings]
        columns = [text.slot for text in texts], [text.length for text in texts]
        slots, text_lengths = to_device([np.array(column, dtype=np.int64) for column in columns], latents.device)
        # No text at all has slot -1, which is the last one's: of length 0, none of it counts.
        text = self._texts.states[slots]
        spans = zip(drawings, starts, strict=True)
        numbers = [
            [drawing.image.guidance_scale, *drawing.times[start : start + count + 1]] for drawing, start in spans
        ]
        scale, *t = sent(torch.tensor(numbers, dtype=torch.float32), latents.device).unbind(1)

        def velocity(latents: Tensor, t: Tensor) -> Tensor:
            by = self.model if self._graphs is None else self._graphs
            found = by.velocity(latents.repeat(passes, 1, 1, 1), t.repeat(passes), text, text_lengths)
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
