"""Stable Diffusion 3: a transformer over image and text together, which reads two CLIP encoders and T5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from weft.model.pipelines.family import Family, Part, Texts


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
