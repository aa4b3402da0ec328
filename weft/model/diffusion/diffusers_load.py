"""Loads a pipeline of `diffusers` from a directory: known classes and safetensors only, and nothing from a network."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from weft.checkpoint.json_file import read_object
from weft.errors import ConfigError, ModelError
from weft.model.diffusion.families import Component, PipelineFamily, PixArtAlpha, PixArtSigma, StableDiffusion3

INDEX_FILE = "model_index.json"
FAMILIES: dict[str, type[PipelineFamily]] = {
    "PixArtAlphaPipeline": PixArtAlpha,
    "PixArtSigmaPipeline": PixArtSigma,
    "StableDiffusion3Pipeline": StableDiffusion3,
}


def is_pipeline(folder: Path) -> bool:
    return (folder / INDEX_FILE).is_file()


def load_pipeline(folder: Path, *, dtype: torch.dtype, device: torch.device) -> PipelineFamily:
    """Load a pipeline. Raises ConfigError for a class that is not supported, and ModelError for damaged files."""
    index = read_object(folder / INDEX_FILE)
    class_name = index.get("_class_name")
    if not isinstance(class_name, str) or class_name not in FAMILIES:
        raise ConfigError(
            f"{folder / INDEX_FILE}: pipelines of the class {class_name!r} are not supported.",
            hint=f"Supported: {', '.join(FAMILIES)}.",
        )
    family = FAMILIES[class_name]
    names = [
        name for name, component in family.components.items() if _is_there(index.get(name), name, component, folder)
    ]
    libraries = _libraries(folder)
    components: dict[str, Any] = dict.fromkeys(family.components)
    for name in names:
        component = family.components[name]
        components[name] = _loaded(
            folder / name, getattr(libraries[component.library], component.class_name), dtype, device
        )
    _check_scheduler(folder, components["scheduler"].config)
    return family(getattr(libraries["diffusers"], class_name)(**components), device)


def _is_there(entry: object, name: str, component: Component, folder: Path) -> bool:
    if component.is_optional and entry in (None, [None, None]):
        return False
    known = component.class_name, *component.also_named
    if not isinstance(entry, list) or len(entry) != 2 or entry[0] != component.library or entry[1] not in known:
        raise ModelError(
            f"{folder / INDEX_FILE}: {name} is {entry}; it must be one of {component.library}: {', '.join(known)}."
        )
    return True


def _libraries(folder: Path) -> dict[str, ModuleType]:
    try:
        import diffusers
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{folder} is a pipeline of diffusers, which is not installed.",
            hint="Install it: pip install 'weft-serve[diffusers]'.",
        ) from error
    # They log the text of prompts that are too long.
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
    """Raise ModelError for a scheduler whose steps add noise: an image could not be generated again with the same
    bits."""
    if config.get("algorithm_type", "").startswith("sde-") or config.get("stochastic_sampling"):
        raise ModelError(
            f"{folder / 'scheduler'}: its steps add noise, so an image could not be generated again.",
            hint='Set "algorithm_type" to "dpmsolver++", or "stochastic_sampling" to false.',
        )
