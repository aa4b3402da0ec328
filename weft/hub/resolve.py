"""Resolves what a user calls a model to the files it is made of."""

from __future__ import annotations

import difflib
import logging
from contextlib import nullcontext
from pathlib import Path

from msgspec.structs import replace

from weft.checkpoint.model_files import (
    SOURCES,
    ModelFiles,
    Source,
    dummy_files,
    model_at,
    models_folder,
    partial_folder,
)
from weft.errors import ModelError
from weft.hub.catalog import CATALOGUE, installed, is_installed, pull
from weft.hub.download import pull_lock, remove_tree
from weft.hub.hub_api import GGUF_ID, HUB_ID
from weft.hub.progress import Progress, Report, unheard, with_bars
from weft.hub.short_names import SHORT_NAMES
from weft.hub.snapshots import (
    HubModel,
    check_snapshot,
    find_cached,
    find_snapshot,
    list_models,
    pull_snapshot,
    remove_snapshot,
)
from weft.options import Config

log = logging.getLogger(__name__)

_BY_NAME = (
    "Give a name of `weft models --all`, such as smollm2, or a hub id such as org/name, org/name:Q4_K_M or "
    "modelscope:org/name."
)
POSSIBLE = (
    "Give a name of `weft models --all`, a .gguf file, a Hugging Face directory, or a hub id such as org/name, "
    "org/name:Q4_K_M or modelscope:org/name."
)


def resolve(
    model: str,
    revision: str = "",
    *,
    allow_pull: bool = True,
    progress: bool = True,
    report: Report = unheard,
    with_code: bool = False,
    verify: bool = False,
) -> ModelFiles:
    """Return the files of a catalogue name, a path, an installed model or a hub id; pulled first where that is allowed.

    `progress`: show bars. `with_code`: Python files of a hub model as well. `verify`: read all files again and compare
    them with their checksums, as far as these are known.
    """
    with with_bars(report) if progress else nullcontext(report) as tracked:
        if model in CATALOGUE:
            return _of_catalogue(model, revision, tracked, allow_pull=allow_pull, verify=verify)
        path = _path_of(model)
        if path is not None:
            _no_revision(model, revision)
            tracked(Progress("verify", note=model))
            return model_at(path, name=model if path.parent == models_folder() else "")
        if _looks_like_path(model) and not GGUF_ID.fullmatch(model):
            raise ModelError(f"{model}: there is no such file or directory.", hint=POSSIBLE)
        asked = _hub_model(model, revision, with_code)
        if asked is None:
            raise ModelError(f"There is no model {model!r}.", hint=_nearest(model))
        if verify:
            check_snapshot(asked, tracked)
        found = _on_disk(asked, allow_pull=allow_pull)
        if found is not None:
            return found
        if not allow_pull:
            raise _not_installed(model)
        return pull_snapshot(asked, tracked)


def pull_by_name(model: str, report: Report) -> ModelFiles:
    """Return the files of a catalogue name or a hub id, pulled first where they are not on this machine. Unlike
    `resolve` it looks at no path: the name may come from another machine."""
    asked = _hub_model(model, "", with_code=False)
    if model in CATALOGUE:
        return pull(model, report)
    if asked is None:
        raise ModelError(f"There is no model {model!r:.200}.", hint=_BY_NAME)
    return _on_disk(asked, allow_pull=True) or pull_snapshot(asked, report)


def remove(model: str, revision: str = "") -> int:
    """Remove a model that is in Weft's folder, and return the bytes of its files. A hub model is removed with all its
    commits, or with that of the revision. Raises ModelError for one that is not there, or is not Weft's to remove."""
    if model in CATALOGUE or (_is_plain_name(model) and (models_folder() / model).exists()):
        _no_revision(model, revision)
        folders = [folder for folder in (models_folder() / model, partial_folder() / model) if folder.exists()]
        if not folders:
            raise _not_installed(model)
        with pull_lock(model, lambda: log.warning("Another process is pulling %s; waiting for it.", model)):
            return sum(map(remove_tree, folders))
    asked = None if _existing(model) is not None else _hub_model(model, revision, with_code=False)
    if asked is None:
        raise ModelError(
            f"{model}: `weft rm` removes what `weft pull` fetched, by its name.", hint="See `weft models`."
        )
    freed = remove_snapshot(asked)
    if freed is not None:
        return freed
    if (theirs := find_cached(asked)) is not None:
        raise ModelError(
            f"{model} is in the cache of the hub's own client, which Weft does not change: {theirs.path}.",
            hint="`hf cache rm` removes it." if asked.source == "huggingface" else "",
        )
    raise _not_installed(model)


def _of_catalogue(model: str, revision: str, report: Report, *, allow_pull: bool, verify: bool) -> ModelFiles:
    _no_revision(model, revision)
    if allow_pull:
        return pull(model, report, verify=verify)
    if not is_installed(CATALOGUE[model]):
        raise _not_installed(model)
    return installed(CATALOGUE[model])


def _on_disk(asked: HubModel, *, allow_pull: bool) -> ModelFiles | None:
    found = find_snapshot(asked)
    if found is not None:
        return found
    try:
        return find_cached(asked)
    except ModelError as error:
        if not allow_pull:
            raise
        log.info("%s It is pulled.", error)
        return None


def _path_of(model: str) -> Path | None:
    """Return the path that the name is, or that it has in the folder of models."""
    path = _existing(model)
    if path is None and _is_plain_name(model):
        return _existing(str(models_folder() / model))
    return path


def _existing(model: str) -> Path | None:
    """Return the path if it exists; a text that no path can be (too long, a zero byte, an unknown ~user) does not."""
    try:
        path = Path(model).expanduser()
        return path if model and path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _hub_model(model: str, revision: str, with_code: bool) -> HubModel | None:
    if short := SHORT_NAMES.get(model):
        return HubModel("huggingface", short.hub_id, revision, gguf=short.file)
    # As Ollama's users, or those of a browser, write it.
    model = model.removeprefix("https://").removeprefix("hf.co/").removeprefix("huggingface.co/")
    source: Source = next((source for source in SOURCES if model.startswith(f"{source}:")), "huggingface")
    hub_id = model.removeprefix(f"{source}:")
    if named := GGUF_ID.fullmatch(hub_id):
        return HubModel(source, named[1], revision, gguf=named[2])
    return HubModel(source, hub_id, revision, with_code) if HUB_ID.fullmatch(hub_id) else None


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
    here = sorted({*CATALOGUE, *(found.name for found in list_models())})
    close = difflib.get_close_matches(model, {*here, *SHORT_NAMES}, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}? {POSSIBLE}" if close else f"Known names: {', '.join(here)}. {POSSIBLE}"


def find_model(config: Config, report: Report = unheard, *, allow_pull: bool = True) -> ModelFiles:
    """Return the files of the model that a configuration names, and of its draft model, pulled if necessary and
    allowed, whole and checked.

    `report` is called for every stage, in the calling thread. A download of which nothing comes for STALL_SECONDS ends
    with a ModelError. Python files come along where the operator trusts them.
    """
    options = config.model
    report(Progress("resolve", note=options.model))

    def find(model: str, revision: str = "") -> ModelFiles:
        if options.load_format == "dummy":
            return dummy_files(Path(model))
        with_code = config.backend.trust_remote_code
        return resolve(model, revision, allow_pull=allow_pull, progress=allow_pull, report=report, with_code=with_code)

    files = find(options.model, options.revision)
    return replace(files, draft=find(options.speculative_model)) if options.speculative_model else files
