"""Pipelines of `diffusers` so small that a test can draw with them: its own classes, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SIZE = 16
"""Of the pictures of all but PixArtAlphaPipeline."""
WORDS = ["a", "red", "blue", "cat", "dog", "on", "the", "mat", "of", "and"]
WIDTH = 32
"""Of what the text encoders say of a token."""
NUM_CLIP_TOKENS = 32
"""Tokens that the CLIP encoders read, behind which those of T5 follow."""


def save_pipeline(name: str, folder: Path, **scheduler: Any) -> Path:
    """Write a pipeline of one of the classes, with changes to its scheduler's settings."""
    torch.manual_seed(11)
    pipeline = MAKERS[name](scheduler)
    with torch.no_grad():
        for part in (pipeline.transformer, pipeline.vae):
            for parameter in part.parameters():
                # Some begin as zeros: every part must be used to be right.
                parameter.add_(torch.randn_like(parameter) * 0.05)
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def _pixart_alpha(scheduler: dict[str, Any]) -> Any:
    """Of 128 latents a side, where this class tells the transformer of sizes, in few patches."""
    import diffusers

    return diffusers.PixArtAlphaPipeline(
        transformer=_pixart_transformer(sample_size=128, patch_size=16),
        vae=_autoencoder(4, num_blocks=1, mid_block_add_attention=False),
        scheduler=diffusers.DPMSolverMultistepScheduler(**scheduler),
        text_encoder=_t5(),
        tokenizer=_t5_tokenizer(),
    )


def _pixart_sigma(scheduler: dict[str, Any]) -> Any:
    import diffusers

    return diffusers.PixArtSigmaPipeline(
        transformer=_pixart_transformer(sample_size=8, patch_size=2),
        vae=_autoencoder(4),
        scheduler=diffusers.DPMSolverMultistepScheduler(**scheduler),
        text_encoder=_t5(),
        tokenizer=_t5_tokenizer(),
    )


def _stable_diffusion_3(scheduler: dict[str, Any]) -> Any:
    import diffusers

    return diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            caption_projection_dim=16,
            pooled_projection_dim=WIDTH,
            out_channels=4,
            pos_embed_max_size=16,
        ),
        vae=_autoencoder(4, shift_factor=0.1),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**({"shift": 3.0} | scheduler)),
        text_encoder=_clip(),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_clip(),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=_t5(),
        tokenizer_3=_t5_tokenizer(),
    )


MAKERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "PixArtAlphaPipeline": _pixart_alpha,
    "PixArtSigmaPipeline": _pixart_sigma,
    "StableDiffusion3Pipeline": _stable_diffusion_3,
}


def _pixart_transformer(*, sample_size: int, patch_size: int) -> Any:
    import diffusers

    return diffusers.PixArtTransformer2DModel(
        sample_size=sample_size,
        patch_size=patch_size,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=3,
        cross_attention_dim=24,
        caption_channels=WIDTH,
    )


def _autoencoder(channels: int, *, num_blocks: int = 2, **changes: Any) -> Any:
    import diffusers

    return diffusers.AutoencoderKL(
        latent_channels=channels,
        block_out_channels=(8,) * num_blocks,
        down_block_types=("DownEncoderBlock2D",) * num_blocks,
        up_block_types=("UpDecoderBlock2D",) * num_blocks,
        norm_num_groups=4,
        layers_per_block=1,
        **changes,
    )


def _t5() -> Any:
    import transformers

    config = transformers.T5Config(vocab_size=64, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return transformers.T5EncoderModel(config).eval()


def _t5_tokenizer() -> Any:
    import transformers

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{word}", -2.0) for word in WORDS)]
    return transformers.T5TokenizerFast(vocab=pieces, extra_ids=0)


def _clip() -> Any:
    import transformers

    config = transformers.CLIPTextConfig(
        vocab_size=64,
        hidden_size=WIDTH // 2,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        projection_dim=WIDTH // 2,
        max_position_embeddings=NUM_CLIP_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return transformers.CLIPTextModelWithProjection(config).eval()


def _clip_tokenizer() -> Any:
    import transformers

    letters = sorted({letter for word in WORDS for letter in word})
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=NUM_CLIP_TOKENS)
