"""The interface between the worker and a diffusion pipeline.

An image is `prepare`d once, its prompts are `encode`d where the pipeline has a text encoder, it makes its steps by
`denoise_step`, in any batch, and is `decode`d at its end and for previews. The last three are units of work that the
scheduler places into steps. The worker keeps the latents between the steps. A step is a function of the latents before
it and of what `prepare` returned, so one that was taken back can be made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from weft.kernels import client_tensor
from weft.model.diffusion import flow
from weft.payloads import LATENTS
from weft.plan import DenoiseAdmission
from weft.types import LatentCheckpoint

KEPT_STATES = 3
"""Latents kept of each image, those after its last steps: two steps may be under way, and both may be taken back."""

ImageState = TypeVar("ImageState")
"""A pipeline's own state of an image."""


class DiffusionPipeline(Protocol[ImageState]):
    """A diffusion pipeline denoises images and decodes them."""

    @property
    def latent_shape(self) -> tuple[int, int, int]: ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""

    def prepare(self, admission: DenoiseAdmission) -> tuple[ImageState, Tensor]:
        """Return what the steps of an image need, and its first latents, those of its checkpoint if it has one:
        float32, on the host. The latents depend on nothing but the admission."""

    def encode(self, image: ImageState, number: int) -> None:
        """Encode the prompt, number 0, or the negative prompt, number 1, by the pipeline's text encoder."""

    def denoise_step(self, latents: Tensor, images: Sequence[ImageState], starts: Sequence[int], count: int) -> Tensor:
        """Return the float32 latents [B, ...] of images after `count` more steps: one, or all that are left. Image i
        has made starts[i] of them; all images have as many passes and the same sampler. A step of an image may be
        repeated, as far back as the latents of KEPT_STATES states reach. Must not wait for the device."""

    def remembered(self, image: ImageState, step: int) -> list[Tensor]:
        """Return what the step after this many needs of those before it besides the latents, each [1, ...] in the
        latents' shape."""

    def warm_up(self) -> bool:
        """Do a piece of warm-up; returns False when there is none left."""

    def decode(self, latents: Tensor) -> Tensor:
        """Return images of -1 to 1, [B, 3, H, W], by the model's VAE where it has one. Must not wait for the device."""


def first_latents(admission: DenoiseAdmission, shape: Sequence[int]) -> Tensor:
    """Return the latents of an image's checkpoint, else those that its client sent, else the noise of its seed."""
    if admission.checkpoint is not None:
        return checkpoint_tensors(admission.checkpoint, shape)[0]
    latents = admission.conditioning.tensor(LATENTS)
    return flow.noise(admission.image.seed, shape) if latents is None else client_tensor(latents).float()


def checkpoint_tensors(checkpoint: LatentCheckpoint, shape: Sequence[int]) -> Tensor:
    """Return the tensors of a checkpoint, [count, ...]: the latents first."""
    return torch.from_numpy(np.frombuffer(checkpoint.latents, np.float32).copy()).view(-1, *shape)
