"""The model that draws beside the language model: found, loaded, and what the scheduler must know of it."""

from __future__ import annotations

import torch
from msgspec import Struct

from weft.config import Config
from weft.errors import ConfigError
from weft.hub.files import ModelFiles
from weft.model.dit import DitConfig, load, read_config
from weft.model.images import check_text_width, find_image_model
from weft.plan import ImageLimits
from weft.switches import is_on
from weft.types import ImageModelInfo
from weft.worker.denoise import Denoiser, canvas_bytes

MIB = 2**20


class ImageSide(Struct, frozen=True):
    denoiser: Denoiser
    limits: ImageLimits
    info: ImageModelInfo


def load_image_side(
    config: Config, files: ModelFiles, *, text_width: int, dtype: torch.dtype, device: torch.device
) -> ImageSide | None:
    """None when nothing is to be drawn."""
    folder = find_image_model(config.model.image_model, files.name)
    if folder is None:
        return None
    geometry = read_config(folder)
    check_text_width(geometry, files.name, text_width)
    limits = _limits(config, geometry, dtype, on_cpu=device.type == "cpu")
    info = ImageModelInfo(
        name=folder.resolve().name,
        width=geometry.image_size,
        height=geometry.image_size,
        num_tokens=geometry.num_tokens,
        max_prompt_tokens=geometry.max_text_tokens,
        steps=geometry.num_steps,
        guidance_scale=geometry.guidance_scale,
    )
    model = load(folder, dtype=dtype, device=device)
    return ImageSide(Denoiser(model, limits.max_num_images, text_dtype=dtype, device=device), limits, info)


def _limits(config: Config, geometry: DitConfig, text_dtype: torch.dtype, *, on_cpu: bool) -> ImageLimits:
    options = config.scheduler
    size, most_bytes = canvas_bytes(geometry, text_dtype), options.max_embedding_mb * MIB
    if size > most_bytes:
        raise ConfigError(
            f"--max-embedding-mb {options.max_embedding_mb}: an image of this model holds {size / MIB:.1f} MiB.",
            hint=f"Set --max-embedding-mb {-(-size // MIB)} or more, or --image-model none.",
        )
    return ImageLimits(
        width=geometry.image_size,
        height=geometry.image_size,
        num_tokens=geometry.num_tokens,
        max_prompt_tokens=geometry.max_text_tokens,
        canvas_bytes=size,
        max_num_images=min(options.max_num_images or (16 if on_cpu else 64), most_bytes // size),
        max_mixed_denoise=options.max_mixed_denoise or (256 if on_cpu else 384),
        max_embedding_bytes=most_bytes,
        whole_images=not is_on("denoise-steps"),
    )
