"""Finds and loads the image model beside a language model, and derives the scheduler's limits for images."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from msgspec import Struct

import weft
from weft.checkpoint.model_files import ModelFiles
from weft.errors import ConfigError
from weft.model.diffusion.diffusers_load import INDEX_FILE, is_pipeline, load_pipeline
from weft.model.diffusion.diffusers_pipeline import DiffusersPipeline, kept_bytes, unit_costs
from weft.model.diffusion.dit import CONFIG_FILE, WEIGHTS_FILE, DitConfig, encoded_bytes, load, read_config
from weft.options import Config
from weft.plan import ImageLimits
from weft.switches import is_on
from weft.types import ImageModelInfo
from weft.worker.diffusion.denoiser import Denoiser, PromptEmbedsTable, latent_slot_bytes
from weft.worker.diffusion.dit_graphs import VelocityGraphs
from weft.worker.diffusion.dit_pipeline import DitPipeline, dit_inputs

PACKAGED = Path(weft.__file__).parent / "data" / "shapes"
"""The small model that comes with Weft."""
AUTO, NONE = "auto", "none"
log = logging.getLogger(__name__)


def find_image_model(wanted: str, text_model: str, text_width: int) -> Path | None:
    """Return the folder of the image model for a language model with hidden states of this width; None: there is none.
    Raises ConfigError for a model that the configuration names and that is not there."""
    if wanted == NONE:
        return None
    if wanted == AUTO:
        if not all((PACKAGED / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE)):
            return None
        packaged = read_config(PACKAGED)
        return PACKAGED if (packaged.text_model, packaged.text_width) == (text_model, text_width) else None
    folder = Path(wanted).expanduser()
    if not is_pipeline(folder) and not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"--image-model {wanted}: there is neither {CONFIG_FILE} nor {INDEX_FILE} in that directory.",
            hint=f"Give {AUTO}, {NONE}, a directory with {CONFIG_FILE} and {WEIGHTS_FILE}, or a pipeline of diffusers.",
        )
    return folder


def check_text_width(config: DitConfig, text_model: str, text_width: int) -> None:
    """Raise ConfigError when an image model cannot use a language model's hidden states."""
    if config.text_width != text_width:
        raise ConfigError(
            f"The image model takes hidden states {config.text_width} wide (of {config.text_model}); those of "
            f"{text_model} are {text_width} wide.",
            hint=f"Set --image-model {NONE}, or serve the language model that it was made for.",
        )


MIB = 2**20
PROMPTS_PER_IMAGE = 2
"""The prompt and the negative prompt."""


class ImageModel(Struct, frozen=True):
    """A loaded image model, with its limits and its description."""

    denoiser: Denoiser
    limits: ImageLimits
    info: ImageModelInfo


def load_image_model(
    config: Config, files: ModelFiles, *, text_width: int, dtype: torch.dtype, device: torch.device
) -> ImageModel | None:
    """Load the image model; returns None when there is none."""
    folder = find_image_model(config.model.image_model, files.name, text_width)
    if folder is None:
        return None
    if is_pipeline(folder):
        return _load_diffusers(config, folder, dtype, device)
    check_text_width(read_config(folder), files.name, text_width)
    return _load_dit(config, folder, dtype, device)


def _load_dit(config: Config, folder: Path, dtype: torch.dtype, device: torch.device) -> ImageModel:
    geometry = read_config(folder)
    info = ImageModelInfo(
        name=folder.resolve().name,
        width=geometry.image_size,
        height=geometry.image_size,
        num_tokens=geometry.num_tokens,
        max_prompt_tokens=geometry.max_text_tokens,
        inputs=dit_inputs(geometry),
        steps=geometry.num_steps,
        guidance_scale=geometry.guidance_scale,
    )
    on_cpu, embeds_size = device.type == "cpu", geometry.max_text_tokens * geometry.text_width
    size = latent_slot_bytes(geometry.latent_shape, PROMPTS_PER_IMAGE * encoded_bytes(geometry, dtype) if on_cpu else 0)
    limits = _limits(config, info, size, embeds_bytes=embeds_size * dtype.itemsize, on_cpu=on_cpu)
    table = PromptEmbedsTable(
        limits.max_num_embeds, geometry.max_text_tokens, geometry.text_width, dtype=dtype, device=device
    )
    model, graphs = load(folder, dtype=dtype, device=device), None
    if device.type == "cuda" and is_on("graphs"):
        most = 2 * limits.max_num_images
        graphs = VelocityGraphs(model, most, embeds_dtype=dtype, device=device)
    pipeline = DitPipeline(model, table, graphs)
    return ImageModel(Denoiser(pipeline, limits.max_num_images, device=device, embeds=table), limits, info)


def _load_diffusers(config: Config, folder: Path, dtype: torch.dtype, device: torch.device) -> ImageModel:
    family = load_pipeline(folder, dtype=dtype, device=device)
    info = ImageModelInfo(
        name=folder.resolve().name,
        width=family.image_size,
        height=family.image_size,
        num_tokens=family.num_tokens,
        max_prompt_tokens=family.max_text_tokens,
        inputs=family.inputs,
        steps=family.steps,
        guidance_scale=family.guidance_scale,
        reads_text=True,
    )
    size = latent_slot_bytes(family.latent_shape, kept_bytes(family))
    costs, step = unit_costs(family), PROMPTS_PER_IMAGE * info.num_tokens
    log.info("%s: a prompt counts as %d tokens, a picture as %d, a step with guidance as %d.", info.name, *costs, step)
    limits = _limits(config, info, size, costs=costs, on_cpu=device.type == "cpu")
    pipeline = DiffusersPipeline(family, limits.max_num_images)
    return ImageModel(Denoiser(pipeline, limits.max_num_images, device=device), limits, info)


def _limits(
    config: Config,
    info: ImageModelInfo,
    size: int,
    *,
    embeds_bytes: int = 0,
    costs: tuple[int, int] = (0, 0),
    on_cpu: bool,
) -> ImageLimits:
    """Return the limits of images that hold `size` bytes each, and prompt embeds of `embeds_bytes` a prompt, with the
    `costs` to encode a prompt and to decode an image. Where clients may send tensors, there are bytes for at least
    those of one image."""
    options = config.scheduler
    most_bytes = options.max_embedding_mb * MIB
    given = sum(one.num_bytes for one in info.inputs.values()) if config.limits.allow_prompt_embeds else 0
    with_embeds = size + PROMPTS_PER_IMAGE * embeds_bytes
    if (least := with_embeds + given) > most_bytes:
        raise ConfigError(
            f"--max-embedding-mb {options.max_embedding_mb}: an image of this model holds {least / MIB:.1f} MiB.",
            hint=f"Set --max-embedding-mb {-(-least // MIB)} or more, or --image-model none.",
        )
    max_num_images = min(options.max_num_images or (16 if on_cpu else 64), (most_bytes - given) // with_embeds)
    return ImageLimits(
        width=info.width,
        height=info.height,
        num_tokens=info.num_tokens,
        max_prompt_tokens=info.max_prompt_tokens,
        reads_text=info.reads_text,
        encode_cost=costs[0],
        decode_cost=costs[1],
        inputs=info.inputs,
        checkpoint_steps=options.image_checkpoint_steps,
        latent_slot_bytes=size,
        embeds_bytes=embeds_bytes,
        max_num_images=max_num_images,
        max_num_embeds=0 if info.reads_text else PROMPTS_PER_IMAGE * max_num_images,
        max_mixed_denoise=options.max_mixed_denoise or (256 if on_cpu else 2048),
        max_embedding_bytes=most_bytes,
        whole_images=not is_on("denoise-steps"),
        single_images=not is_on("denoise-batches"),
    )
