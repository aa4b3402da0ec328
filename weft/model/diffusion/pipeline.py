"""What the worker asks of a model that draws, whichever it is.

An image is `prepare`d once, makes its steps by `denoise_step`, in any company, and is `decode`d at its end and wherever
it is to be seen before. The worker keeps the latents between the steps. A step is a function of the latents before it
and of what `prepare` gave, so one that was taken back is made again from where it began.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from weft.plan import DenoiseAdmission

KEPT_STATES = 3
"""Of each image, those after its last steps: two steps may be under way, and both may be taken back."""

Drawing = TypeVar("Drawing")
"""What a model keeps of an image that it draws."""


class Painter(Protocol[Drawing]):
    @property
    def latent_shape(self) -> tuple[int, int, int]: ...

    @property
    def num_bytes(self) -> int:
        """Of the weights."""

    def prepare(self, admission: DenoiseAdmission) -> tuple[Drawing, Tensor]:
        """What the steps of an image need, and its first latents: float32, on the host. They depend on nothing but the
        image's parameters."""

    def denoise_step(self, latents: Tensor, drawings: Sequence[Drawing], starts: Sequence[int], count: int) -> Tensor:
        """The float32 latents [B, ...] of images after `count` more steps: one, or all that are left. Image i has made
        starts[i] of them; all images have as many passes and the same sampler. A step of an image may be asked for
        again, as far back as the latents of KEPT_STATES states reach. Must not wait for the device."""

    def make_ready(self) -> bool:
        """Do a piece of work that makes later steps faster; False when there is none left."""

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures of -1 to 1, [B, 3, H, W]: by the model's autoencoder, where it has one. Must not wait either."""
