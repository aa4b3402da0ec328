"""Hub models, with a stand-in for the client library: pinned to a commit, filtered, whole, and clear when it fails."""

from __future__ import annotations

import fnmatch
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.hub.fake_directory import make_directory, put
from weft.errors import ModelError
from weft.hub.installed import list_models
from weft.hub.resolve import resolve

FIRST, SECOND = "1" * 40, "2" * 40
FILES = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "tokenizer.json"]


class HTTPError(Exception):
    pass


class RepositoryNotFoundError(HTTPError, OSError):
    pass


class GatedRepoError(RepositoryNotFoundError):
    pass


class RevisionNotFoundError(HTTPError, OSError):
    pass


class FakeHub(types.ModuleType):
    """As much of huggingface_hub as Weft calls."""

    def __init__(self) -> None:
        super().__init__("huggingface_hub")
        self.errors = types.ModuleType("huggingface_hub.errors")
        for error in (HTTPError, RepositoryNotFoundError, GatedRepoError, RevisionNotFoundError):
            setattr(self.errors, error.__name__, error)
        self.utils = types.ModuleType("huggingface_hub.utils")
        self.utils.are_progress_bars_disabled = lambda: False  # type: ignore[attr-defined]
        self.utils.disable_progress_bars = lambda: None  # type: ignore[attr-defined]
        self.utils.enable_progress_bars = lambda: None  # type: ignore[attr-defined]
        self.commits = {None: FIRST, "v1": FIRST}
        self.files = FILES
        self.failure: Exception | None = None
        self.calls: list[dict[str, Any]] = []
        self.leave_out = ""

    def HfApi(self) -> FakeHub:
        return self

    def model_info(self, hub_id: str, *, revision: str | None, timeout: float, files_metadata: bool) -> Any:
        assert timeout <= 5
        if self.failure is not None:
            raise self.failure
        files = [types.SimpleNamespace(rfilename=name, size=10) for name in self.files]
        return types.SimpleNamespace(sha=self.commits[revision], siblings=files)

    def snapshot_download(self, hub_id: str, *, local_dir: Path, **options: Any) -> None:
        self.calls.append(options)
        make_directory(local_dir)
        put(local_dir, "revision.txt", options["revision"])
        (local_dir / ".cache" / "huggingface").mkdir(parents=True)
        if self.leave_out:
            (local_dir / self.leave_out).unlink()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    for name, module in {"": fake, ".errors": fake.errors, ".utils": fake.utils}.items():
        monkeypatch.setitem(sys.modules, f"huggingface_hub{name}", module)
    return fake


def test_a_hub_id_is_pulled_at_a_commit(hub: FakeHub, weft_home: Path) -> None:
    files = resolve("org/name", progress=False)
    assert (files.name, files.kind, files.revision) == ("org/name", "huggingface", FIRST)
    assert files.path == weft_home / "hub" / "org--name" / FIRST
    assert hub.calls[0]["revision"] == FIRST
    assert not (files.path / ".cache").exists()
    assert [(model.name, model.revision) for model in list_models()] == [("org/name", FIRST)]


def test_the_newest_of_the_day_stays_the_newest_until_another_revision_is_asked_for(hub: FakeHub) -> None:
    resolve("org/name", progress=False)
    hub.commits = {None: SECOND, "v2": SECOND}
    hub.failure = HTTPError("no network")
    assert resolve("org/name", progress=False).revision == FIRST
    assert resolve("org/name", FIRST, allow_pull=False).revision == FIRST
    hub.failure = None
    assert resolve("org/name", "v2", progress=False).revision == SECOND
    assert resolve("org/name", "v2", allow_pull=False).revision == SECOND
    assert resolve("org/name", allow_pull=False).revision == FIRST
    assert len(list_models()) == 2


def test_two_revisions_of_one_commit_are_downloaded_once(hub: FakeHub) -> None:
    resolve("org/name", progress=False)
    resolve("org/name", "v1", progress=False)
    assert len(hub.calls) == 1


def test_only_what_is_safe_and_needed_is_asked_for(hub: FakeHub) -> None:
    resolve("org/name", progress=False)
    (options,) = hub.calls

    def asked(name: str) -> bool:
        allowed = any(fnmatch.fnmatch(name, pattern) for pattern in options["allow_patterns"])
        return allowed and not any(fnmatch.fnmatch(name, pattern) for pattern in options["ignore_patterns"])

    assert all(asked(name) for name in [*FILES, "tokenizer.model", "chat_template.jinja"])
    refused = ["pytorch_model.bin", "model.pt", "modeling_x.py", "onnx/config.json", "original/a.safetensors", "x.gguf"]
    assert not any(asked(name) for name in refused)


def test_an_incomplete_download_is_not_put_in_place(hub: FakeHub, weft_home: Path) -> None:
    hub.leave_out = "model-00002-of-00002.safetensors"
    with pytest.raises(ModelError, match="weight files are missing"):
        resolve("org/name", progress=False)
    assert not (weft_home / "hub").exists()
    assert list_models() == []


def test_a_model_without_safetensors_is_refused_before_the_download(hub: FakeHub) -> None:
    hub.files = ["config.json", "pytorch_model.bin"]
    with pytest.raises(ModelError, match="no safetensors weights; Weft loads safetensors and GGUF only"):
        resolve("org/name", progress=False)
    assert hub.calls == []


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            HTTPError("Name or service not known\nmore"),
            "cannot be fetched from the hub: Name or service not known. Check",
        ),
        (ConnectionError("offline mode"), "cannot be fetched from the hub: offline mode."),
        (TimeoutError(), "cannot be fetched from the hub: TimeoutError."),
        (GatedRepoError(), "org/name is gated"),
        (RepositoryNotFoundError(), "The hub has no model 'org/name'"),
        (RevisionNotFoundError(), "has no revision 'v9'"),
    ],
)
def test_a_failure_is_one_line(hub: FakeHub, failure: Exception, message: str) -> None:
    hub.failure = failure
    with pytest.raises(ModelError) as raised:
        resolve("org/name", "v9", progress=False)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_without_the_client_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install 'weft\[hub\]'"):
        resolve("org/name")


def test_nothing_is_fetched_where_pulling_is_not_allowed(hub: FakeHub) -> None:
    with pytest.raises(ModelError, match=r"org/name is not installed\. Run `weft pull org/name`"):
        resolve("org/name", allow_pull=False)
