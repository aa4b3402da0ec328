"""What a file or a directory on this machine is: a GGUF file, or a Hugging Face model."""

from __future__ import annotations

from pathlib import Path

from weft.errors import ModelError
from weft.hub.files import ModelFiles
from weft.hub.shards import find_shards


def model_at(path: Path, *, name: str = "", revision: str = "") -> ModelFiles:
    """The model at a path that exists; refuses one that is incomplete or of a kind that Weft does not load."""
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
