"""Checks the safetensors files of a Hugging Face directory: which there must be, and that each is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.checkpoint.json_file import parse_object, read_object
from weft.errors import ModelError

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format itself."""
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def find_shards(folder: Path) -> list[Path]:
    """Return every weight file, complete against the index where there is one."""
    index = folder / INDEX
    if index.is_file():
        held = {path: tensor_names(path) for path in _indexed(folder, index)}
        for tensor, name in _weight_map(index).items():
            if tensor not in held[folder / name]:
                raise ModelError(f"{folder / name}: the tensor {tensor!r} is missing, though {INDEX} lists it.")
        return list(held)
    whole = folder / "model.safetensors"
    shards = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if not shards:
        raise _no_weights(folder)
    if any("-of-" in path.name for path in shards):
        raise ModelError(f"{folder}: the weights are in parts, and {INDEX} is missing.", hint="Fetch it as well.")
    for path in shards:
        tensor_names(path)
    return shards


def tensor_names(path: Path) -> set[str]:
    """Return the tensors of a safetensors file, whose length is checked against what its header promises."""
    return set(tensor_starts(path))


def tensor_starts(path: Path) -> dict[str, int]:
    """Return where in a safetensors file each of its tensors begins, after the same check."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
                raise ModelError(f"{path}: not a safetensors file, or one cut short at {size} bytes.")
            header = file.read(header_bytes)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}.") from error
    try:
        entries = parse_object(header.decode(), path)
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: the header is not UTF-8 text.") from error
    entries.pop("__metadata__", None)
    first = 8 + header_bytes
    expected = first + max((_end(path, name, entry) for name, entry in entries.items()), default=0)
    if size != expected:
        raise ModelError(f"{path}: {size} bytes, and {expected} are expected.", hint="Fetch the file again.")
    return {name: first + entry["data_offsets"][0] for name, entry in entries.items()}


def _end(path: Path, name: str, entry: Any) -> int:
    match entry:
        case {"data_offsets": [int(start), int(stop)]} if 0 <= start <= stop:
            return stop
    raise ModelError(f"{path}: the header's entry for {name!r} has no valid data_offsets.")


def _indexed(folder: Path, index: Path) -> list[Path]:
    names = sorted(set(_weight_map(index).values()))
    for name in names:
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise ModelError(f"{index}: {name!r} is refused: a shard is a .safetensors file of the same folder.")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder}: {len(missing)} of {len(names)} weight files are missing: {', '.join(missing[:3])}"
            f"{', …' if len(missing) > 3 else ''}.",
            hint="Fetch the model again.",
        )
    return [folder / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(f"{index}: weight_map must give a file for every tensor.")
    return weight_map


def _no_weights(folder: Path) -> ModelError:
    if any(path for pattern in PICKLED for path in folder.glob(pattern)):
        return ModelError(
            f"{folder}: the weights are pickled (.bin, .pt), which can run code; Weft loads safetensors and GGUF only.",
            hint="Take a safetensors revision of the model, or convert it.",
        )
    return ModelError(f"{folder}: there are no weights: no .safetensors file.")
