"""The diffusion transformer as a painter: it draws from a language model's hidden states, which it finds by slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.model import flow
from weft.model.dit import Dit
from weft.plan import DenoiseAdmission
from weft.worker.dit_graphs import VelocityGraphs
from weft.worker.dit_passes import DevicePasses, DitDrawing, Passes, SteadyPasses
from weft.worker.texts import TextTable
from weft.worker.transfer import sent


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
