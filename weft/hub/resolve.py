"""From what a user calls a model to the files it is made of."""

from __future__ import annotations

import difflib
from pathlib import Path

from weft.errors import ModelError
from weft.hub.catalog import CATALOGUE
from weft.hub.directory import model_at
from weft.hub.files import ModelFiles, models_folder
from weft.hub.huggingface import HUB_ID, find_snapshot, pull_snapshot
from weft.hub.installed import list_models
from weft.hub.pull import installed, is_installed, pull

POSSIBLE = "Give a name from `weft models`, a .gguf file, a Hugging Face directory, or a hub id such as org/name."


def resolve(model: str, revision: str = "", *, allow_pull: bool = True, progress: bool = True) -> ModelFiles:
    """The files of a catalogue name, a path, an installed model or a hub id; pulled first where that is allowed."""
    if model in CATALOGUE:
        _no_revision(model, revision)
        if not is_installed(CATALOGUE[model]) and not allow_pull:
            raise _not_installed(model)
        return pull(model, progress=progress) if allow_pull else installed(CATALOGUE[model])
    path = _existing(model)
    if path is not None:
        _no_revision(model, revision)
        return model_at(path)
    path = _existing(str(models_folder() / model)) if _is_plain_name(model) else None
    if path is not None:
        _no_revision(model, revision)
        return model_at(path, name=model)
    if _looks_like_path(model):
        raise ModelError(f"{model}: there is no such file or directory.", hint=POSSIBLE)
    if HUB_ID.fullmatch(model):
        found = find_snapshot(model, revision)
        if found is not None:
            return found
        if not allow_pull:
            raise _not_installed(model)
        return pull_snapshot(model, revision, progress=progress)
    raise ModelError(f"There is no model {model!r}.", hint=_nearest(model))


def _existing(model: str) -> Path | None:
    """The path, where it is one; a text that no path can be (too long, a zero byte, an unknown ~user) is not."""
    try:
        path = Path(model).expanduser()
        return path if model and path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _is_plain_name(model: str) -> bool:
    return bool(model) and not model.startswith(".") and "/" not in model


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or model.endswith((".gguf", ".safetensors", "/"))


def _no_revision(model: str, revision: str) -> None:
    if revision:
        raise ModelError(f"{model} has no revisions; --revision {revision} is for hub models alone.")


def _not_installed(model: str) -> ModelError:
    return ModelError(f"{model} is not installed.", hint=f"Run `weft pull {model}`.")


def _nearest(model: str) -> str:
    known = sorted({*CATALOGUE, *(found.name for found in list_models())})
    close = difflib.get_close_matches(model, known, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}? {POSSIBLE}" if close else f"Known names: {', '.join(known)}. {POSSIBLE}"
