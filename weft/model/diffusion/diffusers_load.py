"""Loading a pipeline of `diffusers` from a directory: known classes alone, safetensors alone, and nothing from a
network."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from weft.checkpoint.json_file import read_object
from weft.errors import ConfigError, ModelError
from weft.model.diffusion.families import Family, Part, PixArtAlpha, PixArtSigma, StableDiffusion3

INDEX_FILE = "model_index.json"
FAMILIES: dict[str, type[Family]] = {
    "PixArtAlphaPipeline": PixArtAlpha,
    "PixArtSigmaPipeline": PixArtSigma,
    "StableDiffusion3Pipeline": StableDiffusion3,
}


def is_pipeline(folder: Path) -> bool:
    return (folder / INDEX_FILE).is_file()


def load_pipeline(folder: Path, *, dtype: torch.dtype, device: torch.device) -> Family:
    """Raises ConfigError for a class that Weft does not know, and ModelError for files that are not as they should."""
    index = read_object(folder / INDEX_FILE)
    class_name = index.get("_class_name")
    if not isinstance(class_name, str) or class_name not in FAMILIES:
        raise ConfigError(
            f"{folder / INDEX_FILE}: Weft does not draw with pipelines of the class {class_name!r}.",
            hint=f"It does with {', '.join(FAMILIES)}.",
        )
    family = FAMILIES[class_name]
    names = [name for name, part in family.parts.items() if _is_there(index.get(name), name, part, folder)]
    libraries = _libraries(folder)
    parts: dict[str, Any] = dict.fromkeys(family.parts)
    for name in names:
        part = family.parts[name]
        parts[name] = _loaded(folder / name, getattr(libraries[part.library], part.class_name), dtype, device)
    _check_scheduler(folder, parts["scheduler"].config)
    return family(getattr(libraries["diffusers"], class_name)(**parts), device)


def _is_there(entry: object, name: str, part: Part, folder: Path) -> bool:
    if part.is_optional and entry in (None, [None, None]):
        return False
    known = part.class_name, *part.also_named
    if not isinstance(entry, list) or len(entry) != 2 or entry[0] != part.library or entry[1] not in known:
        raise ModelError(
            f"{folder / INDEX_FILE}: {name} is {entry}; it must be of {part.library}, and one of {', '.join(known)}."
        )
    return True


def _libraries(folder: Path) -> dict[str, ModuleType]:
    try:
        import diffusers
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{folder} is a pipeline of diffusers, which is not installed.",
            hint="Install it: pip install 'weft[diffusers]'.",
        ) from error
    # What they log of a prompt that is too long is the prompt.
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    return {"diffusers": diffusers, "transformers": transformers}


def _loaded(folder: Path, kind: Any, dtype: torch.dtype, device: torch.device) -> Any:
    is_model = issubclass(kind, torch.nn.Module)
    try:
        if not is_model:
            return kind.from_pretrained(folder, local_files_only=True)
        model, report = kind.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, torch_dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"{folder}: it cannot be loaded as a {kind.__name__}: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{folder}: there is no {missing[0]} among the weights of a {kind.__name__}.")
    return model.requires_grad_(False).eval().to(device)


def _check_scheduler(folder: Path, config: Any) -> None:
    """An image must be the same whenever it is drawn again, so its steps draw no noise of their own."""
    if config.get("algorithm_type", "").startswith("sde-") or config.get("stochastic_sampling"):
        raise ModelError(
            f"{folder / 'scheduler'}: its steps add noise, so an image could not be drawn again.",
            hint='Set "algorithm_type" to "dpmsolver++", or "stochastic_sampling" to false.',
        )
