"""A pipeline of `diffusers` as a painter."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.model.diffusion import flow
from weft.model.diffusion.families import Family, Texts
from weft.model.diffusion.pipeline import KEPT_STATES
from weft.plan import DenoiseAdmission
from weft.types import ImageParams

NUM_TEXTS = 2


class PipelineDrawing(NamedTuple):
    image: ImageParams
    texts: Texts
    """Two rows of the painter's tables: of the prompt, and of what to steer away from."""
    timesteps: Tensor
    scale: Tensor
    """The last two on the device."""
    schedulers: list[Any]
    """The one that stands before step s is at s % KEPT_STATES: a scheduler remembers what the transformer said before,
    and a step that is made again needs it as it was."""


class PipelinePainter:
    def __init__(self, family: Family, num_slots: int) -> None:
        self._family = family
        self._tables = {
            name: text.new_zeros(num_slots, NUM_TEXTS, *text.shape[1:]) for name, text in family.blank.items()
        }
        """What its texts became, by canvas."""
        # One picture after the other: the autoencoder takes more memory than all else.
        family.autoencoder.enable_slicing()

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        return self._family.latent_shape

    @property
    def num_bytes(self) -> int:
        """Of all models of the pipeline, and of the texts."""
        parts = [part for part in self._family.pipeline.components.values() if isinstance(part, torch.nn.Module)]
        return _num_bytes(self._tables.values()) + sum(_num_bytes(part.parameters()) for part in parts)

    def prepare(self, admission: DenoiseAdmission) -> tuple[PipelineDrawing, Tensor]:
        image = admission.image
        found = self._family.encode(image.prompt_text, image.negative_text if image.passes > 1 else None)
        texts = {name: table[admission.slot] for name, table in self._tables.items()}
        for name, text in found.items():
            texts[name][: image.passes] = text
        scheduler = self._family.schedule(image.steps)
        device = self._family.device
        drawing = PipelineDrawing(
            image=image,
            texts=texts,
            timesteps=scheduler.timesteps.to(device),
            scale=torch.tensor(image.guidance_scale, device=device),
            schedulers=[scheduler] * KEPT_STATES,
        )
        return drawing, flow.noise(image.seed, self.latent_shape)

    def denoise_step(
        self, latents: Tensor, drawings: Sequence[PipelineDrawing], starts: Sequence[int], count: int
    ) -> Tensor:
        begun = zip(drawings, starts, strict=True)
        schedulers = [_copy(drawing.schedulers[start % KEPT_STATES]) for drawing, start in begun]
        for i in range(count):
            noise = self._noise(latents, drawings, [start + i for start in starts])
            images = zip(schedulers, torch.split(noise, 1), torch.split(latents, 1), strict=True)
            latents = torch.cat([_moved(*image) for image in images])
        for drawing, start, scheduler in zip(drawings, starts, schedulers, strict=True):
            drawing.schedulers[(start + 1) % KEPT_STATES] = scheduler
        return latents

    def make_ready(self) -> bool:
        return False

    def decode(self, latents: Tensor) -> Tensor:
        autoencoder = self._family.autoencoder
        scaled = latents / autoencoder.config.scaling_factor + (autoencoder.config.shift_factor or 0.0)
        pictures: Tensor = autoencoder.decode(scaled.to(autoencoder.dtype), return_dict=False)[0]
        return pictures.float()

    def _noise(self, latents: Tensor, drawings: Sequence[PipelineDrawing], steps: Sequence[int]) -> Tensor:
        """What is to be taken away from latents, or the velocity: as the transformer says, guided."""
        passes = drawings[0].image.passes
        texts = {
            name: torch.stack([drawing.texts[name][text] for text in range(passes) for drawing in drawings])
            for name in self._tables
        }
        times = torch.stack([drawing.timesteps[step] for drawing, step in zip(drawings, steps, strict=True)])
        inputs = latents.to(self._family.transformer.dtype).repeat(passes, 1, 1, 1)
        noise = self._family.predict(inputs, times.repeat(passes), texts).float()
        if passes == 1:
            return noise
        conditional, unconditional = noise.chunk(2)
        return flow.guided(conditional, unconditional, torch.stack([drawing.scale for drawing in drawings]))


def held_bytes(family: Family) -> int:
    """What an image holds besides its latents: its texts, and what its schedulers remember."""
    solver_order = family.pipeline.scheduler.config.get("solver_order", 0)
    num_remembered = KEPT_STATES - 1 + solver_order if solver_order else 0
    remembered = num_remembered * math.prod(family.latent_shape) * torch.float32.itemsize
    return NUM_TEXTS * _num_bytes(family.blank.values()) + remembered


def _copy(scheduler: Any) -> Any:
    """One that goes on by itself. What a scheduler remembers it replaces, and never writes into."""
    twin = copy.copy(scheduler)
    for name, value in vars(scheduler).items():
        if isinstance(value, list):
            setattr(twin, name, value.copy())
    return twin


def _moved(scheduler: Any, noise: Tensor, latents: Tensor) -> Tensor:
    step = scheduler.step_index or 0
    moved: Tensor = scheduler.step(noise, scheduler.timesteps[step], latents, return_dict=False)[0]
    return moved


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
