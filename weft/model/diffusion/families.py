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


class PixArtSigma(Family):
    parts: ClassVar[Mapping[str, Part]] = {
        "transformer": Part("diffusers", "PixArtTransformer2DModel", also_named=("Transformer2DModel",)),
        "vae": Part("diffusers", "AutoencoderKL"),
        "scheduler": Part("diffusers", "DPMSolverMultistepScheduler"),
        "text_encoder": Part("transformers", "T5EncoderModel"),
        "tokenizer": Part("transformers", "T5TokenizerFast", also_named=("T5Tokenizer",)),
    }
    steps = 20
    guidance_scale = 4.5
    max_text_tokens = 300

    def encode(self, prompt: str, negative: str | None) -> Texts:
        states, mask, negative_states, negative_mask = self.pipeline.encode_prompt(
            prompt,
            negative is not None,
            negative_prompt=negative or "",
            device=self.device,
            max_sequence_length=self.max_text_tokens,
        )
        if negative is not None:
            states, mask = torch.cat([states, negative_states]), torch.cat([mask, negative_mask])
        return {"encoder_hidden_states": states, "encoder_attention_mask": mask}

    def predict(self, latents: Tensor, timesteps: Tensor, texts: Texts) -> Tensor:
        (found,) = self.transformer(
            latents,
            timestep=timesteps,
            added_cond_kwargs=self._sizes(latents),
            return_dict=False,
            **texts,
        )
        # Behind the noise stands its variance, where the transformer was taught it.
        noise: Tensor = found[:, : latents.shape[1]]
        return noise

    def _sizes(self, latents: Tensor) -> dict[str, Tensor | None]:
        return {"resolution": None, "aspect_ratio": None}


class PixArtAlpha(PixArtSigma):
    max_text_tokens = 120

    def _sizes(self, latents: Tensor) -> dict[str, Tensor | None]:
        """Only the transformer for the largest images is told of them."""
        if self.transformer.config.sample_size != 128:
            return super()._sizes(latents)
        return {
            "resolution": latents.new_full((len(latents), 2), self.image_size),
            "aspect_ratio": latents.new_ones(len(latents), 1),
        }


class StableDiffusion3(Family):
    parts: ClassVar[Mapping[str, Part]] = {
        "transformer": Part("diffusers", "SD3Transformer2DModel"),
        "vae": Part("diffusers", "AutoencoderKL"),
        "scheduler": Part("diffusers", "FlowMatchEulerDiscreteScheduler"),
        "text_encoder": Part("transformers", "CLIPTextModelWithProjection"),
        "tokenizer": Part("transformers", "CLIPTokenizer", also_named=("CLIPTokenizerFast",)),
        "text_encoder_2": Part("transformers", "CLIPTextModelWithProjection"),
        "tokenizer_2": Part("transformers", "CLIPTokenizer", also_named=("CLIPTokenizerFast",)),
        "text_encoder_3": Part("transformers", "T5EncoderModel", is_optional=True),
        "tokenizer_3": Part("transformers", "T5TokenizerFast", also_named=("T5Tokenizer",), is_optional=True),
    }
    steps = 28
    guidance_scale = 7.0
    max_text_tokens = 256

    def encode(self, prompt: str, negative: str | None) -> Texts:
        states, negative_states, pooled, negative_pooled = self.pipeline.encode_prompt(
            prompt,
            None,
            None,
            device=self.device,
            do_classifier_free_guidance=negative is not None,
            negative_prompt=negative,
            max_sequence_length=self.max_text_tokens,
        )
        if negative is not None:
            states, pooled = torch.cat([states, negative_states]), torch.cat([pooled, negative_pooled])
        return {"encoder_hidden_states": states, "pooled_projections": pooled}

    def predict(self, latents: Tensor, timesteps: Tensor, texts: Texts) -> Tensor:
        found: Tensor
        (found,) = self.transformer(latents, timestep=timesteps, return_dict=False, **texts)
        return found

    def schedule_options(self) -> dict[str, float]:
        config = self.pipeline.scheduler.config
        if not config.use_dynamic_shifting:
            return {}
        from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

        shift: float = calculate_shift(
            self.num_tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
        )
        return {"mu": shift}
