"""What Weft knows of a class of pipelines: the parts it is made of, how it reads a prompt, and how its transformer is
called. The rest is the same for all."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from msgspec import Struct
from torch import Tensor

Texts = dict[str, Tensor]
"""What the transformer is told of texts, [number of texts, ...], by the names that it has for it."""


class Part(Struct, frozen=True):
    library: Literal["diffusers", "transformers"]
    class_name: str
    also_named: tuple[str, ...] = ()
    """Other names that model_index.json may have for that class."""
    is_optional: bool = False


class Family(ABC):
    parts: ClassVar[Mapping[str, Part]]
    steps: ClassVar[int]
    guidance_scale: ClassVar[float]
    """The last two: for a request that does not say."""
    max_text_tokens: ClassVar[int]

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        """Of a pipeline of `diffusers`."""
        self.pipeline = pipeline
        self.device = device
        self.transformer = pipeline.transformer
        self.autoencoder = pipeline.vae

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        config = self.transformer.config
        return config.in_channels, config.sample_size, config.sample_size

    @property
    def image_size(self) -> int:
        """Pictures are square, as large as those that the transformer was made for."""
        return int(self.transformer.config.sample_size * self.pipeline.vae_scale_factor)

    @property
    def num_tokens(self) -> int:
        """What an image counts as in a pass, against a budget of tokens."""
        config = self.transformer.config
        return int((config.sample_size // config.patch_size) ** 2)

    @cached_property
    def blank(self) -> Texts:
        """Of one text without words: as large as those of any other."""
        return self.encode("", None)

    @abstractmethod
    def encode(self, prompt: str, negative: str | None) -> Texts:
        """Of the prompt, and of what to steer away from where that is wanted. Longer ones are cut, as the pipeline
        does it."""

    @abstractmethod
    def predict(self, latents: Tensor, timesteps: Tensor, texts: Texts) -> Tensor:
        """What the transformer says of latents, each with its own time and text: one call for all."""

    def schedule(self, steps: int) -> Any:
        """A scheduler that stands before the first of so many steps. It lives on the host, where its arithmetic waits
        for nobody."""
        scheduler = copy.deepcopy(self.pipeline.scheduler)
        scheduler.set_timesteps(steps, device="cpu", **self.schedule_options())
        scheduler.set_begin_index(0)
        if len(scheduler.timesteps) != steps:
            raise ValueError(f"the scheduler makes {len(scheduler.timesteps)} steps of {steps}")
        return scheduler

    def schedule_options(self) -> dict[str, float]:
        return {}
