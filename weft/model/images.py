"""Which model draws beside a language model."""

from __future__ import annotations

from pathlib import Path

import weft
from weft.errors import ConfigError
from weft.model.dit import CONFIG_FILE, WEIGHTS_FILE, DitConfig, read_config
from weft.model.pipelines.load import INDEX_FILE, is_pipeline

PACKAGED = Path(weft.__file__).parent / "data" / "shapes"
"""The small model that comes with Weft."""
AUTO, NONE = "auto", "none"


def find_image_model(wanted: str, text_model: str, text_width: int) -> Path | None:
    """The folder of the model that draws beside a language model with hidden states of this width; None: nothing is
    drawn. Raises ConfigError for one that was asked for and is not there."""
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
    """Raise ConfigError where an image model cannot read what a language model makes of a prompt."""
    if config.text_width != text_width:
        raise ConfigError(
            f"The image model draws from hidden states {config.text_width} wide (of {config.text_model}); those of "
            f"{text_model} are {text_width} wide.",
            hint=f"Set --image-model {NONE}, or serve the language model that it was made for.",
        )
