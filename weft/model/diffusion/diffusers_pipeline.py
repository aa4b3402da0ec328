"""A pipeline of `diffusers` behind the worker's interface."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.model.diffusion import flow
from weft.model.diffusion.families import PipelineFamily, PromptTensors
from weft.model.diffusion.pipeline import KEPT_STATES
from weft.plan import DenoiseAdmission
from weft.types import ImageParams

NUM_PROMPTS = 2


class DiffusersImage(NamedTuple):
    """The pipeline's state of an image."""

    params: ImageParams
    prompts: PromptTensors
    """Two rows of the pipeline's tables: of the prompt, and of the negative prompt."""
    timesteps: Tensor
    scale: Tensor
    """The last two are on the device."""
    schedulers: list[Any]
    """The scheduler before step s is at s % KEPT_STATES: a scheduler remembers earlier predictions, and a step that is
    made again needs it as it was."""


class DiffusersPipeline:
    """The pipeline encodes prompts, and makes the steps of many images with one call of the transformer."""

    def __init__(self, family: PipelineFamily, num_slots: int) -> None:
        self._family = family
        self._tables = {
            name: tensor.new_zeros(num_slots, NUM_PROMPTS, *tensor.shape[1:]) for name, tensor in family.blank.items()
        }
        """The encoded prompts of images, by latent slot."""
        # Images are decoded one after the other: the VAE takes more memory than all else.
        family.vae.enable_slicing()

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        return self._family.latent_shape

    @property
    def num_bytes(self) -> int:
        """Bytes of all models of the pipeline, and of the encoded prompts."""
        parts = [part for part in self._family.pipeline.components.values() if isinstance(part, torch.nn.Module)]
        return _num_bytes(self._tables.values()) + sum(_num_bytes(part.parameters()) for part in parts)

    def prepare(self, admission: DenoiseAdmission) -> tuple[DiffusersImage, Tensor]:
        params = admission.image
        encoded = self._family.encode(params.prompt_text, params.negative_text if params.passes > 1 else None)
        prompts = {name: table[admission.slot] for name, table in self._tables.items()}
        for name, tensor in encoded.items():
            prompts[name][: params.passes] = tensor
        scheduler = self._family.schedule(params.steps)
        device = self._family.device
        image = DiffusersImage(
            params=params,
            prompts=prompts,
            timesteps=scheduler.timesteps.to(device),
            scale=torch.tensor(params.guidance_scale, device=device),
            schedulers=[scheduler] * KEPT_STATES,
        )
        return image, flow.noise(params.seed, self.latent_shape)

    def denoise_step(
        self, latents: Tensor, images: Sequence[DiffusersImage], starts: Sequence[int], count: int
    ) -> Tensor:
        begun = zip(images, starts, strict=True)
        schedulers = [_copy(image.schedulers[start % KEPT_STATES]) for image, start in begun]
        for i in range(count):
            noise = self._noise(latents, images, [start + i for start in starts])
            parts = zip(schedulers, torch.split(noise, 1), torch.split(latents, 1), strict=True)
            latents = torch.cat([_moved(*part) for part in parts])
        for image, start, scheduler in zip(images, starts, schedulers, strict=True):
            image.schedulers[(start + 1) % KEPT_STATES] = scheduler
        return latents

    def warm_up(self) -> bool:
        return False

    def decode(self, latents: Tensor) -> Tensor:
        vae = self._family.vae
        scaled = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        images: Tensor = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return images.float()

    def _noise(self, latents: Tensor, images: Sequence[DiffusersImage], steps: Sequence[int]) -> Tensor:
        """Return the guided prediction of the transformer: the noise in latents, or their velocity."""
        passes = images[0].params.passes
        prompts = {
            name: torch.stack([image.prompts[name][number] for number in range(passes) for image in images])
            for name in self._tables
        }
        times = torch.stack([image.timesteps[step] for image, step in zip(images, steps, strict=True)])
        inputs = latents.to(self._family.transformer.dtype).repeat(passes, 1, 1, 1)
        noise = self._family.predict(inputs, times.repeat(passes), prompts).float()
        if passes == 1:
            return noise
        conditional, unconditional = noise.chunk(2)
        return flow.guided(conditional, unconditional, torch.stack([image.scale for image in images]))


def kept_bytes(family: PipelineFamily) -> int:
    """Return the bytes that an image holds besides its latents: its encoded prompts, and its schedulers' memory."""
    solver_order = family.pipeline.scheduler.config.get("solver_order", 0)
    num_remembered = KEPT_STATES - 1 + solver_order if solver_order else 0
    remembered = num_remembered * math.prod(family.latent_shape) * torch.float32.itemsize
    return NUM_PROMPTS * _num_bytes(family.blank.values()) + remembered


def _copy(scheduler: Any) -> Any:
    """Copy a scheduler. Schedulers replace the tensors that they remember, and never write into them."""
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
