"""PixArt: a transformer that attends to the words of one text encoder, T5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from weft.model.pipelines.family import Family, Part, Texts


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
