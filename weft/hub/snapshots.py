"""Finds, pulls and checks models of every hub, each at one commit, in Weft's own folder.

A snapshot at its final path is whole and was checked: it only ever gets there by a rename.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from weft.checkpoint.json_file import read_object_if_there
from weft.checkpoint.model_files import (
    SOURCES,
    InstalledModel,
    ModelFiles,
    Source,
    model_at,
    models_folder,
    partial_folder,
    snapshots_folder,
)
from weft.errors import ModelError
from weft.hub import huggingface, modelscope
from weft.hub.download import check_space, damaged_files, download, missing_files, pull_lock, remove_tree, sync_folder
from weft.hub.hub_api import COMMIT, DEFAULT_GGUF, Found, Hub, RemoteModel, gguf_named, gguf_names, quantisation_of
from weft.hub.progress import Progress, Report
from weft.hub.short_names import short_name_of

HUBS: dict[Source, Hub] = {"huggingface": huggingface, "modelscope": modelscope}
PINS = "pins.json"
DIGESTS = ".digests.json"
"""The file beside a snapshot's files with the digests that the hub gave when it was pulled."""


class HubModel(Struct, frozen=True):
    """The model that a user asks a hub for."""

    source: Source
    hub_id: str
    revision: str = ""
    """The revision; empty for the newest on the day when it is pulled."""
    with_code: bool = False
    """True to pull Python files as well, for vLLM to run."""
    gguf: str = ""
    """The GGUF file that is meant, by its name or its quantisation; empty for safetensors, or the default one."""

    @property
    def folder(self) -> Path:
        return snapshots_folder(self.source) / self.hub_id.replace("/", "--")

    @property
    def name(self) -> str:
        hub_id = self.hub_id if self.source == "huggingface" else f"{self.source}:{self.hub_id}"
        if not self.gguf:
            return self.hub_id
        return short_name_of(self.hub_id, self.gguf) or f"{hub_id}:{quantisation_of(self.gguf)}"

    @property
    def pin(self) -> str:
        """The revision, and the GGUF file where one is named: each is pinned to a commit when it is pulled."""
        return f"{self.revision}:{self.gguf}" if self.gguf else self.revision


def find_snapshot(model: HubModel) -> ModelFiles | None:
    """Return the model at the commit that the revision stood for when it was pulled; None when it is not here."""
    return _model_in(_own(model), model)


def find_cached(model: HubModel) -> ModelFiles | None:
    """Return the model where the hub's own clients have put it. Raises ModelError where it is incomplete there."""
    return _model_in(_theirs(model), model)


def list_snapshots() -> list[HubModel]:
    """Return every model and commit in Weft's folder, each GGUF file as one."""
    return [
        HubModel(source, path.parent.name.replace("--", "/", 1), path.name, gguf=file)
        for source in SOURCES
        for path in sorted(snapshots_folder(source).glob("*--*/*/"))
        if COMMIT.fullmatch(path.name)
        for file in _models_of(path)
    ]


def _models_of(folder: Path) -> list[str]:
    """Return the GGUF files of a snapshot, with an empty name for its safetensors."""
    files = gguf_names(path.name for path in folder.iterdir())
    return files if files and not (folder / "config.json").is_file() else ["", *files]


def pull_snapshot(model: HubModel, report: Report) -> ModelFiles:
    """Resolve the revision to a commit, download it, check it, and pin the revision to it."""
    remote = HUBS[model.source].look_up(model.hub_id, model.revision, with_code=model.with_code, gguf=model.gguf)
    final = model.folder / remote.commit

    def waiting() -> None:
        report(Progress("resolve", note=f"Another process is pulling {model.hub_id}; waiting for it."))

    with pull_lock(f"{model.source}--{model.folder.name}", waiting):
        try:
            if missing_files(remote, final):
                _fetch(remote, final, report)
            _write_pins(model, {**_pins(model), model.pin: remote.commit})
        except OSError as error:
            raise ModelError(
                f"{model.hub_id} cannot be pulled: {error}.", hint="WEFT_HOME moves the models."
            ) from error
    found = _model_in((final, remote.commit), model)
    if found is None:
        raise ModelError(f"{model.hub_id}: the file that was pulled is gone.", hint="Pull it again.")
    return found


def check_snapshot(model: HubModel, report: Report) -> None:
    """Read all files of a model that is here again. Damaged files in Weft's own folder are fetched again; those of a
    hub's clients are named in an error."""
    found, is_own = _own(model), True
    if found is None:
        found, is_own = _theirs(model), False
    if found is None:
        return
    folder, commit = found
    digests = _digests(model, folder, is_own=is_own)
    file = _gguf_in(folder, model)
    digests = {
        name: digest
        for name, digest in digests.items()
        if (name == file if file is not None else not name.endswith(".gguf"))
    }
    damaged = damaged_files(folder, digests, report, model.hub_id)
    if not damaged:
        return
    if not is_own:
        raise ModelError(
            f"{folder}: damaged or missing: {', '.join(damaged)}.", hint="Remove them, and fetch the model again."
        )
    report(Progress("resolve", note=f"{folder}: damaged files are fetched again: {', '.join(damaged)}."))
    for name in damaged:
        (folder / name).unlink(missing_ok=True)
    # Only ModelScope does not know of commits.
    pull_snapshot(replace(model, revision=commit) if model.source == "huggingface" else model, report)


def remove_snapshot(model: HubModel) -> int | None:
    """Remove a model from Weft's folder, or one GGUF file of it, and return the bytes that it took; None: it is not
    there. Without a revision all its commits go."""
    with pull_lock(f"{model.source}--{model.folder.name}", lambda: None):
        if not model.revision and not model.gguf:
            return remove_tree(model.folder) if model.folder.is_dir() else None
        freed, found = 0, _own(model)
        if found is None:
            return None
        folder, commit = found
        file = _gguf_in(folder, model) if model.gguf else None
        if file is not None:
            freed = remove_tree(folder / file)
        if file is None or _models_of(folder) == [""]:
            freed += remove_tree(folder)
        if not folder.is_dir():
            _write_pins(model, {pin: pinned for pin, pinned in _pins(model).items() if pinned != commit})
        return freed


def _fetch(remote: RemoteModel, final: Path, report: Report) -> None:
    """Fetch into the partial folder and move the snapshot whole; files that a snapshot lacks go into it directly."""
    is_new = not final.is_dir()
    folder = partial_folder() / final.parent.parent.name / final.parent.name / remote.commit if is_new else final
    folder.mkdir(parents=True, exist_ok=True)
    check_space(folder, sum(file.size for file in missing_files(remote, folder)))
    download(remote, folder, report)
    digests = {file.name: file.digest for file in remote.files if file.digest}
    damaged = damaged_files(folder, digests, report, remote.hub_id)
    for name in damaged:
        (folder / name).unlink()
    if damaged:
        raise ModelError(
            f"{remote.hub_id}: checksum mismatch: {', '.join(damaged)}.",
            hint="The files were removed; pull again. If it fails again, do not trust the hub or a proxy in between.",
        )
    (folder / DIGESTS).write_bytes(msgspec.json.encode({**read_object_if_there(folder / DIGESTS), **digests}))
    model_at(folder / remote.files[0].name if remote.files[0].name.endswith(".gguf") else folder)
    if is_new:
        final.parent.mkdir(parents=True, exist_ok=True)
        folder.replace(final)
        sync_folder(final.parent)


def _digests(model: HubModel, folder: Path, *, is_own: bool) -> dict[str, str]:
    """Return what the files' digests must be: as noted at the pull, else as the hub tells now."""
    if is_own and (folder / DIGESTS).is_file():
        return read_object_if_there(folder / DIGESTS)
    if model.source == "huggingface" and not is_own:
        return huggingface.cached_digests(folder)
    remote = HUBS[model.source].look_up(model.hub_id, model.revision, with_code=False, gguf=model.gguf)
    return {file.name: file.digest for file in remote.files if file.digest}


def _own(model: HubModel) -> Found | None:
    pins = _pins(model)
    commits = [model.revision if COMMIT.fullmatch(model.revision) else pins.get(model.pin, "")]
    if model.gguf and not model.revision:
        # The same file may have been pulled by another name.
        commits += pins.values()
    for commit in commits:
        folder = model.folder / commit
        if COMMIT.fullmatch(commit) and folder.is_dir() and (not model.gguf or _gguf_in(folder, model) is not None):
            return folder, commit
    return None


def _theirs(model: HubModel) -> Found | None:
    return HUBS[model.source].cached(model.hub_id, model.revision)


def _model_in(found: Found | None, model: HubModel) -> ModelFiles | None:
    if found is None or _lacks_code(model, found[0]):
        return None
    folder, commit = found
    file = _gguf_in(folder, model)
    if file is None:
        return None if model.gguf else model_at(folder, name=model.hub_id, revision=commit)
    name = replace(model, gguf=file).name if model.gguf else model.hub_id
    return model_at(folder / file, name=name, revision=commit)


def _gguf_in(folder: Path, model: HubModel) -> str | None:
    """Return the GGUF file of a snapshot that is meant; None: it is not there, or safetensors are meant."""
    if not model.gguf and (folder / "config.json").is_file():
        return None
    names = gguf_names(path.name for path in folder.iterdir())
    return gguf_named(names, model.gguf or DEFAULT_GGUF)


def _lacks_code(model: HubModel, folder: Path) -> bool:
    """Return whether code was asked for that the model has and the folder has not."""
    if not model.with_code:
        return False
    return "auto_map" in read_object_if_there(folder / "config.json") and not any(folder.glob("*.py"))


def _pins(model: HubModel) -> dict[str, str]:
    """Return the commit of every revision that was pulled."""
    try:
        return msgspec.json.decode((model.folder / PINS).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        return {}


def _write_pins(model: HubModel, pins: dict[str, str]) -> None:
    fresh = model.folder / f"{PINS}.partial"
    fresh.write_bytes(msgspec.json.encode(pins))
    fresh.replace(model.folder / PINS)


def list_models() -> list[InstalledModel]:
    """List every model that is whole, by name. A damaged one is left out here and explained when it is resolved."""
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
