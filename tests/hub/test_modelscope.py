"""Models of ModelScope are pulled by its API from a local hub, and found where its own clients put them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.fake_directory import make_directory, put
from tests.hub.fake_hub import FakeHub, serving
from weft.errors import ModelError
from weft.hub import download
from weft.hub.resolve import resolve
from weft.hub.snapshots import list_models

MODEL = "modelscope:org/name"
SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(download, "RETRY_SECONDS", 0.01)
    with serving(FakeHub(make_directory(tmp_path / "remote"))) as hub:
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
        yield hub


def test_a_model_is_pulled_and_pinned(hub: FakeHub, weft_home: Path) -> None:
    files = resolve(MODEL, progress=False)
    assert (files.name, files.kind) == ("org/name", "huggingface")
    assert files.path == weft_home / "modelscope" / "org--name" / files.revision
    assert (files.path / SHARD).read_bytes() == (hub.folder / SHARD).read_bytes()
    assert [model.name for model in list_models()] == ["org/name"]
    hub.asked.clear()
    assert resolve(MODEL, allow_pull=False) == files
    assert hub.asked == []
    # Another branch with the same files is the same snapshot, and one with others is another.
    assert resolve(MODEL, "v1", progress=False) == files
    put(hub.folder, "generation_config.json", {})
    assert resolve(MODEL, "master", progress=False).revision != files.revision


def test_a_lost_connection_is_taken_up_and_a_damaged_file_fetched_again(hub: FakeHub) -> None:
    hub.cuts[SHARD] = 50
    path = resolve(MODEL, progress=False).path
    assert hub.ranges == ["bytes=50-"]
    good = (path / SHARD).read_bytes()
    (path / SHARD).write_bytes(bytes(len(good)))
    assert (resolve(MODEL, progress=False, verify=True).path / SHARD).read_bytes() == good


def test_a_wrong_checksum_is_refused(hub: FakeHub) -> None:
    hub.lies["tokenizer.json"] = b"?" * (hub.folder / "tokenizer.json").stat().st_size
    with pytest.raises(ModelError, match=r"checksum mismatch: tokenizer\.json"):
        resolve(MODEL, progress=False)


def test_what_is_not_there_is_one_line(hub: FakeHub) -> None:
    with pytest.raises(ModelError, match=r"ModelScope has no model 'org/name' with the revision 'v9'"):
        resolve(MODEL, "v9", progress=False)
    with pytest.raises(ModelError, match=r"ModelScope has no model 'org/other'"):
        resolve("modelscope:org/other", progress=False)
    with pytest.raises(ModelError, match="There is no model 'modelscope:name'"):
        resolve("modelscope:name", progress=False)


def test_the_token_is_shown(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "ms-1")
    resolve(MODEL, progress=False)
    assert hub.tokens == {"Bearer ms-1"}


@pytest.mark.parametrize(
    "folder",
    [
        "models/org--name.5/snapshots/master",
        "models/org/name___5",
        "hub/models/org/name___5",
        "hub/org/name___5",
        "org/name___5",
    ],
)
def test_the_cache_of_its_own_clients_is_used_as_it_is(folder: str, tmp_path: Path, weft_home: Path) -> None:
    path = make_directory(tmp_path / "modelscope_cache" / folder)
    (path / ".mv").write_text("Revision:master,CreatedAt:1700000000")
    for revision in ("", "master"):
        files = resolve("modelscope:org/name.5", revision, allow_pull=False)
        assert (files.path, files.name, files.revision) == (path, "org/name.5", "master")
    assert not weft_home.exists()
    with pytest.raises(ModelError, match="not installed"):
        resolve("modelscope:org/name.5", "v1", allow_pull=False)
    with pytest.raises(ModelError, match="not installed"):
        resolve("org/name.5", allow_pull=False)


def test_a_file_that_its_cache_lacks_is_named(tmp_path: Path) -> None:
    path = make_directory(tmp_path / "modelscope_cache" / "hub" / "models" / "org" / "name")
    (path / SHARD).unlink()
    with pytest.raises(ModelError, match=f"1 of 2 weight files are missing: {SHARD}"):
        resolve(MODEL, allow_pull=False)


def test_its_cache_is_checked_against_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    path = make_directory(tmp_path / "modelscope_cache" / "models" / "org" / "name")
    assert resolve(MODEL, progress=False, verify=True).path == path
    put(path, "config.json", "{}")
    with pytest.raises(ModelError, match=r"damaged or missing: config\.json"):
        resolve(MODEL, progress=False, verify=True)
