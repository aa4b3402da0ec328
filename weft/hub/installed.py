"""What `weft models` lists: the models of the home folder."""

from __future__ import annotations

from collections.abc import Iterator

from weft.errors import ModelError
from weft.hub.directory import model_at
from weft.hub.files import InstalledModel, ModelFiles, models_folder
from weft.hub.snapshots import find_snapshot, list_snapshots


def list_models() -> list[InstalledModel]:
    """Every model that is whole, by name. A damaged one is left out here and explained when it is resolved."""
    return sorted((_describe(files) for files in _found()), key=lambda model: model.name)


def _found() -> Iterator[ModelFiles]:
    for folder in sorted(models_folder().glob("*/")):
        try:
            yield model_at(folder, name=folder.name)
        except ModelError:
            continue
    for model in list_snapshots():
        try:
            files = find_snapshot(model)
        except ModelError:
            continue
        if files is not None:
            yield files


def _describe(files: ModelFiles) -> InstalledModel:
    size = sum(path.stat().st_size for path in files.weight_files)
    return InstalledModel(name=files.name, kind=files.kind, path=files.path, size_bytes=size, revision=files.revision)
