"""The folders that models are stored in on this machine, and the files of one model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct

from weft.checkpoint.safetensors import find_shards
from weft.errors import ModelError

Kind = Literal["gguf", "huggingface", "dummy"]
Source = Literal["huggingface", "modelscope"]
SOURCES: tuple[Source, ...] = get_args(Source)


class ModelFiles(Struct, frozen=True, kw_only=True):
    """A model that is whole, on this machine."""

    name: str
    """The name that clients use: its catalogue name, its hub id, or the stem of its file or directory."""
    kind: Kind
    path: Path
    """The GGUF file, or the directory that holds config.json."""
    weight_files: list[Path]
    revision: str = ""
    """The commit of a hub model, the version of a catalogue model; empty for a path."""
    sampling: dict[str, float] = {}
    """Values for fields of `SamplingDefaults`, which hold where its files recommend nothing."""
    draft: ModelFiles | None = None
    """The draft model beside it, which is loaded with it."""


def dummy_files(path: Path) -> ModelFiles:
    """Describe a model of which there is only config.json: random weights, and numbers in place of a vocabulary."""
    folder = path.absolute()
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: there is no config.json.", hint="--load-format dummy needs nothing else.")
    return ModelFiles(name=folder.name, kind="dummy", path=folder, weight_files=[])


class InstalledModel(Struct, frozen=True, kw_only=True):
    """One model of the home folder, as `weft models` shows it."""

    name: str
    kind: Kind
    path: Path
    size_bytes: int
    revision: str = ""


def home() -> Path:
    """Return the folder of pulled models: WEFT_HOME, or ~/.cache/weft."""
    chosen = os.environ.get("WEFT_HOME", "")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "weft"


def models_folder() -> Path:
    """Return the folder of models, one subfolder for each by name; a model put there by hand is found as well."""
    return home() / "models"


def snapshots_folder(source: Source) -> Path:
    """Return the folder of hub models: org--name/<commit>/, and org--name/pins.json with the pulled revisions."""
    return home() / {"huggingface": "hub", "modelscope": "modelscope"}[source]


def partial_folder() -> Path:
    """Return the folder of downloads under way. Nothing in it is ever loaded."""
    return home() / "partial"


def locks_folder() -> Path:
    return home() / "locks"


def model_at(path: Path, *, name: str = "", revision: str = "") -> ModelFiles:
    """Describe the model at a path that exists. Raises ModelError for one that Weft does not load."""
    path = path.absolute()
    if path.is_file():
        return _gguf(path, name or path.stem, revision)
    if (path / "config.json").is_file():
        return ModelFiles(
            name=name or path.name, kind="huggingface", path=path, weight_files=find_shards(path), revision=revision
        )
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return _gguf(found[0], name or path.name, revision)
    if found:
        raise ModelError(
            f"{path}: {len(found)} GGUF files: {', '.join(file.name for file in found[:4])}.", hint="Give one of them."
        )
    find_shards(path)
    raise ModelError(f"{path}: config.json is missing beside the weights.")


def _gguf(path: Path, name: str, revision: str) -> ModelFiles:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}.") from error
    if magic != b"GGUF":
        raise ModelError(
            f"{path}: not a GGUF file: it begins with {magic!r}.",
            hint="A single file must be GGUF; for safetensors give the directory that holds config.json.",
        )
    return ModelFiles(name=name, kind="gguf", path=path, weight_files=[path], revision=revision)
