"""The families of diffusers pipelines that Weft supports: their components, how they encode a prompt, and how their
transformer is called. The rest is the same for all."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from msgspec import Struct
from torch import Tensor

from weft.payloads import (
    LATENTS,
    NEGATIVE_PROMPT_EMBEDS,
    PROMPT_EMBEDS,
    SIGMAS,
    TIMESTEPS,
    DeclaredInput,
)

POOLED_EMBEDS = "pooled_prompt_embeds", "negative_pooled_prompt_embeds"
"""The inputs with which prompt embeds, and those of the negative prompt, go where a transformer takes both."""

PromptTensors = dict[str, Tensor]
"""The transformer's inputs for prompts, [number of prompts, ...], by the names of its arguments."""


class Component(Struct, frozen=True):
    """A component of a pipeline."""

    library: Literal["diffusers", "transformers"]
    class_name: str
    also_named: tuple[str, ...] = ()
    """Other names of that class in model_index.json."""
    is_optional: bool = False


class PipelineFamily(ABC):
    """A family of pipelines: what its members have in common."""

    components: ClassVar[Mapping[str, Component]]
    steps: ClassVar[int]
    guidance_scale: ClassVar[float]
    """The last two are the defaults of requests."""
    max_text_tokens: ClassVar[int]

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        """Wrap a pipeline of `diffusers`."""
        self.pipeline = pipeline
        self.device = device
        self.transformer = pipeline.transformer
        self.vae = pipeline.vae

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        config = self.transformer.config
        return config.in_channels, config.sample_size, config.sample_size

    @property
    def image_size(self) -> int:
        """The side of its images, which are square and as large as those that the transformer was made for."""
        return int(self.transformer.config.sample_size * self.pipeline.vae_scale_factor)

    @property
    def num_tokens(self) -> int:
        """Tokens that one pass over an image counts as."""
        config = self.transformer.config
        return int((config.sample_size // config.patch_size) ** 2)

    @cached_property
    def blank(self) -> PromptTensors:
        """The tensors of an empty prompt: as large as those of any other."""
        return self.encode("")

    @property
    def inputs(self) -> dict[str, DeclaredInput]:
        """The inputs that its stages take from clients."""
        return {LATENTS: DeclaredInput(stage="denoise", shape=self.latent_shape)}

    @abstractmethod
    def encode(self, prompt: str) -> PromptTensors:
        """Encode a prompt. A longer one is cut, as the pipeline does."""

    @abstractmethod
    def client_prompt(self, embeds: Tensor, pooled: Tensor | None) -> PromptTensors:
        """Return the tensors of a prompt that a client has encoded."""

    @abstractmethod
    def predict(self, latents: Tensor, timesteps: Tensor, prompts: PromptTensors) -> Tensor:
        """Return the transformer's prediction for latents, each with its own timestep and prompt, in one call."""

    def schedule(self, steps: int, given: dict[str, Any], *, first: int = 0) -> Any:
        """Return a scheduler before its step `first`, with the schedule that a client gave, if any. It lives on the
        host, where its arithmetic does not wait for the device."""
        scheduler = copy.deepcopy(self.pipeline.scheduler)
        scheduler.set_timesteps(**(given or {"num_inference_steps": steps}), device="cpu", **self.schedule_options())
        scheduler.set_begin_index(first)
        if len(scheduler.timesteps) != steps:
            raise ValueError(f"the scheduler makes {len(scheduler.timesteps)} steps of {steps}")
        return scheduler

    def schedule_options(self) -> dict[str, float]:
        return {}

    def remembered(self, scheduler: Any) -> list[Tensor]:
        """Return what a scheduler remembers of the steps before, each [1, ...] in the latents' shape."""
        return []

    def recall(self, scheduler: Any, step: int, remembered: Sequence[Tensor]) -> None:
        """Have a scheduler remember what `remembered` returned of another one after so many steps."""
        if remembered:
            raise ValueError("this scheduler remembers nothing")


OWN_SCHEDULES = "karras_sigmas", "lu_lambdas", "exponential_sigmas", "beta_sigmas", "flow_sigmas"
"""Settings of a scheduler with which it takes no timesteps from others."""


class PixArtSigma(PipelineFamily):
    components: ClassVar[Mapping[str, Component]] = {
        "transformer": Component("diffusers", "PixArtTransformer2DModel", also_named=("Transformer2DModel",)),
        "vae": Component("diffusers", "AutoencoderKL"),
        "scheduler": Component("diffusers", "DPMSolverMultistepScheduler"),
        "text_encoder": Component("transformers", "T5EncoderModel"),
        "tokenizer": Component("transformers", "T5TokenizerFast", also_named=("T5Tokenizer",)),
    }
    steps = 20
    guidance_scale = 4.5
    max_text_tokens = 300

    @property
    def inputs(self) -> dict[str, DeclaredInput]:
        config, shape = self.pipeline.scheduler.config, self.blank["encoder_hidden_states"].shape[1:]
        embeds = DeclaredInput(stage="encode", shape=tuple(shape), fewer_rows=True)
        inputs = super().inputs | {PROMPT_EMBEDS: embeds, NEGATIVE_PROMPT_EMBEDS: embeds}
        if not any(config.get(f"use_{own}") for own in OWN_SCHEDULES):
            largest = config.num_train_timesteps - 1
            inputs[TIMESTEPS] = DeclaredInput(stage="denoise", largest=largest, whole_numbers=True)
        return inputs

    def encode(self, prompt: str) -> PromptTensors:
        states, mask, *_ = self.pipeline.encode_prompt(
            prompt, False, device=self.device, max_sequence_length=self.max_text_tokens
        )
        return {"encoder_hidden_states": states, "encoder_attention_mask": mask}

    def client_prompt(self, embeds: Tensor, pooled: Tensor | None) -> PromptTensors:
        states, mask = (torch.zeros_like(blank) for blank in self.blank.values())
        states[0, : len(embeds)] = embeds
        mask[0, : len(embeds)] = 1
        return {"encoder_hidden_states": states, "encoder_attention_mask": mask}

    def remembered(self, scheduler: Any) -> list[Tensor]:
        return [output for output in scheduler.model_outputs if output is not None]

    def recall(self, scheduler: Any, step: int, remembered: Sequence[Tensor]) -> None:
        missing = len(scheduler.model_outputs) - len(remembered)
        scheduler.model_outputs = [None] * missing + list(remembered)
        scheduler.lower_order_nums = min(step, scheduler.config.solver_order)

    def predict(self, latents: Tensor, timesteps: Tensor, prompts: PromptTensors) -> Tensor:
        (found,) = self.transformer(
            latents,
            timestep=timesteps,
            added_cond_kwargs=self._sizes(latents),
            return_dict=False,
            **prompts,
        )
        # The noise is followed by its variance, where the transformer was trained to predict it.
        noise: Tensor = found[:, : latents.shape[1]]
        return noise

    def _sizes(self, latents: Tensor) -> dict[str, Tensor | None]:
        return {"resolution": None, "aspect_ratio": None}


class PixArtAlpha(PixArtSigma):
    max_text_tokens = 120

    def _sizes(self, latents: Tensor) -> dict[str, Tensor | None]:
        """Return the sizes for the transformer of the largest images; the others take none."""
        if self.transformer.config.sample_size != 128:
            return super()._sizes(latents)
        return {
            "resolution": latents.new_full((len(latents), 2), self.image_size),
            "aspect_ratio": latents.new_ones(len(latents), 1),
        }


class StableDiffusion3(PipelineFamily):
    components: ClassVar[Mapping[str, Component]] = {
        "transformer": Component("diffusers", "SD3Transformer2DModel"),
        "vae": Component("diffusers", "AutoencoderKL"),
        "scheduler": Component("diffusers", "FlowMatchEulerDiscreteScheduler"),
        "text_encoder": Component("transformers", "CLIPTextModelWithProjection"),
        "tokenizer": Component("transformers", "CLIPTokenizer", also_named=("CLIPTokenizerFast",)),
        "text_encoder_2": Component("transformers", "CLIPTextModelWithProjection"),
        "tokenizer_2": Component("transformers", "CLIPTokenizer", also_named=("CLIPTokenizerFast",)),
        "text_encoder_3": Component("transformers", "T5EncoderModel", is_optional=True),
        "tokenizer_3": Component("transformers", "T5TokenizerFast", also_named=("T5Tokenizer",), is_optional=True),
    }
    steps = 28
    guidance_scale = 7.0
    max_text_tokens = 256

    @property
    def inputs(self) -> dict[str, DeclaredInput]:
        states, pooled = (tuple(blank.shape[1:]) for blank in self.blank.values())
        inputs = super().inputs | {SIGMAS: DeclaredInput(stage="denoise")}
        for name, pooled_name in zip((PROMPT_EMBEDS, NEGATIVE_PROMPT_EMBEDS), POOLED_EMBEDS, strict=True):
            inputs[name] = DeclaredInput(stage="encode", shape=states)
            inputs[pooled_name] = DeclaredInput(stage="encode", shape=pooled, goes_with=name)
        return inputs

    def encode(self, prompt: str) -> PromptTensors:
        states, _, pooled, _ = self.pipeline.encode_prompt(
            prompt,
            None,
            None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_text_tokens,
        )
        return {"encoder_hidden_states": states, "pooled_projections": pooled}

    def client_prompt(self, embeds: Tensor, pooled: Tensor | None) -> PromptTensors:
        assert pooled is not None, "the request was checked"
        return {"encoder_hidden_states": embeds[None], "pooled_projections": pooled[None]}

    def predict(self, latents: Tensor, timesteps: Tensor, prompts: PromptTensors) -> Tensor:
        found: Tensor
        (found,) = self.transformer(latents, timestep=timesteps, return_dict=False, **prompts)
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
