"""The interface between the worker and a diffusion pipeline.

An image is `prepare`d once, makes its steps by `denoise_step`, in any batch, and is `decode`d at its end and for
previews. The worker keeps the latents between the steps. A step is a function of the latents before it and of what
`prepare` returned, so one that was taken back can be made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from weft.plan import DenoiseAdmission

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
        """Return what the steps of an image need, and its first latents: float32, on the host. The latents depend on
        nothing but the image's parameters."""

    def denoise_step(self, latents: Tensor, images: Sequence[ImageState], starts: Sequence[int], count: int) -> Tensor:
        """Return the float32 latents [B, ...] of images after `count` more steps: one, or all that are left. Image i
        has made starts[i] of them; all images have as many passes and the same sampler. A step of an image may be
        repeated, as far back as the latents of KEPT_STATES states reach. Must not wait for the device."""

    def warm_up(self) -> bool:
        """Do a piece of warm-up; returns False when there is none left."""

    def decode(self, latents: Tensor) -> Tensor:
        """Return images of -1 to 1, [B, 3, H, W], by the model's VAE where it has one. Must not wait for the device."""
