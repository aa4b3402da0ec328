"""Hub models are pinned to a commit, filtered, resumed and checked, and failures are explained. The hub's own client
runs against the same local hub, and its cache is read."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.hub.fake_directory import make_directory, put
from tests.hub.fake_hub import FakeHub, serving
from weft.errors import ModelError
from weft.hub import download
from weft.hub import download as disk
from weft.hub.progress import Progress
from weft.hub.resolve import resolve
from weft.hub.snapshots import list_models

FIRST, SECOND = "1" * 40, "2" * 40
SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(download, "RETRY_SECONDS", 0.01)
    with serving(FakeHub(make_directory(tmp_path / "remote"))) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def pull(model: str = "org/name", revision: str = "", **options: Any) -> Any:
    return resolve(model, revision, progress=False, **options)


def files_asked(hub: FakeHub) -> list[str]:
    return sorted(path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path)


def test_a_hub_id_is_pulled_at_a_commit(hub: FakeHub, weft_home: Path) -> None:
    files = pull()
    assert (files.name, files.kind, files.revision) == ("org/name", "huggingface", FIRST)
    assert files.path == weft_home / "hub" / "org--name" / FIRST
    assert all(f"/resolve/{FIRST}/" in path for path in hub.asked[1:])
    assert (files.path / SHARD).read_bytes() == (hub.folder / SHARD).read_bytes()
    assert [(model.name, model.revision) for model in list_models()] == [("org/name", FIRST)]


def test_the_newest_of_the_day_stays_the_newest_until_another_revision_is_asked_for(hub: FakeHub) -> None:
    pull()
    hub.commits = {"main": SECOND, "v/2": SECOND}
    hub.refusal = (503, "")
    assert pull().revision == FIRST
    assert pull(revision=FIRST, allow_pull=False).revision == FIRST
    hub.refusal = None
    assert pull(revision="v/2").revision == SECOND
    assert pull(revision="v/2", allow_pull=False).revision == SECOND
    assert pull(allow_pull=False).revision == FIRST
    assert len(list_models()) == 2


def test_two_revisions_of_one_commit_are_downloaded_once(hub: FakeHub) -> None:
    pull()
    asked = files_asked(hub)
    pull(revision="v1")
    assert files_asked(hub) == asked


def test_only_what_is_safe_and_needed_is_fetched(hub: FakeHub) -> None:
    (hub.folder / "onnx").mkdir()
    refused = ["pytorch_model.bin", "model.pt", "modeling_x.py", "onnx/config.json", "x.gguf", "README.md"]
    refused.append(".digests.json")
    for name in [*refused, "tokenizer.model", "chat_template.jinja"]:
        put(hub.folder, name, "text")
    path = pull().path
    assert {file.name for file in path.iterdir()} - {".digests.json"} == set(hub.names()) - set(refused)


def test_code_comes_along_where_it_is_trusted_and_the_weights_stay(hub: FakeHub) -> None:
    put(hub.folder, "config.json", {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}})
    put(hub.folder, "modeling_x.py", "print()")
    path = pull().path
    assert not (path / "modeling_x.py").exists()
    hub.asked.clear()
    assert pull(with_code=True).path == path
    assert files_asked(hub) == ["modeling_x.py"]
    assert pull(with_code=True, allow_pull=False).path == path


def test_every_stage_is_told_with_its_bytes(hub: FakeHub) -> None:
    heard: list[Progress] = []
    path = pull(report=heard.append).path
    total = sum(file.stat().st_size for file in path.iterdir() if file.name != ".digests.json")
    assert [progress.stage for progress in heard if progress.done == progress.total] == ["download", "verify"]
    assert heard[-1] == Progress("verify", total, total, "org/name")
    assert [progress.done for progress in heard if progress.stage == "verify"] == sorted(
        progress.done for progress in heard if progress.stage == "verify"
    )


# Downloads that do not go well.


def test_a_lost_connection_is_taken_up_where_it_broke(hub: FakeHub) -> None:
    hub.cuts[SHARD] = 50
    assert (pull().path / SHARD).read_bytes() == (hub.folder / SHARD).read_bytes()
    assert hub.ranges == ["bytes=50-"]


def test_a_killed_download_goes_on_where_it_was(hub: FakeHub, weft_home: Path) -> None:
    partial = weft_home / "partial" / "hub" / "org--name" / FIRST
    partial.mkdir(parents=True)
    (partial / f"{SHARD}.partial").write_bytes((hub.folder / SHARD).read_bytes()[:40])
    shutil.copy(hub.folder / "config.json", partial)
    assert (pull().path / SHARD).read_bytes() == (hub.folder / SHARD).read_bytes()
    assert hub.ranges == ["bytes=40-"]
    assert "config.json" not in files_asked(hub)
    assert not partial.exists()


def test_a_download_that_stalls_says_so(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "STALL_SECONDS", 0.4)
    hub.hangs = True
    with pytest.raises(ModelError, match=r"The download of org/name stalled: nothing came for 0\.4 s"):
        pull()


def test_what_comes_again_and_again_is_no_progress(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = itertools.count()

    def now() -> float:
        """Stands still until the file has come twice, and jumps from then on."""
        return 3600.0 * next(hours) if files_asked(hub).count("config.json") > 2 else 0.0

    monkeypatch.setattr(download, "time", SimpleNamespace(monotonic=now))
    put(hub.folder, "config.json", "{}" + " " * 100)
    hub.lies["config.json"] = b"{}"
    with pytest.raises(ModelError, match=r"stalled.*\(config\.json ended after 2 of 102 bytes\)"):
        pull()


def test_a_file_larger_than_promised_is_not_taken(hub: FakeHub) -> None:
    hub.lies["config.json"] = b" " * 1000
    with pytest.raises(ModelError, match=r"config\.json is larger than the \d+ bytes announced"):
        pull()


@pytest.mark.parametrize("name", ["config.json", SHARD])
def test_a_wrong_checksum_installs_nothing(hub: FakeHub, weft_home: Path, name: str) -> None:
    content = (hub.folder / name).read_bytes()
    hub.lies[name] = content[:-1] + b"!"
    with pytest.raises(ModelError, match=f"checksum mismatch: {name}"):
        pull()
    assert not (weft_home / "hub").exists()
    hub.lies.clear()
    hub.asked.clear()
    assert (pull().path / name).read_bytes() == content
    assert files_asked(hub) == [name]


def test_an_incomplete_model_is_not_put_in_place(hub: FakeHub, weft_home: Path) -> None:
    (hub.folder / SHARD).unlink()
    with pytest.raises(ModelError, match=f"1 of 2 weight files are missing: {SHARD}"):
        pull()
    assert not (weft_home / "hub").exists()
    assert list_models() == []


def test_a_full_disk_is_noticed_before_the_download(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = disk.shutil.disk_usage(hub.folder)._replace(free=10)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ModelError, match="MB are needed"):
        pull()
    assert files_asked(hub) == []


def test_a_model_without_safetensors_is_refused_before_the_download(hub: FakeHub) -> None:
    for path in hub.folder.glob("*.safetensors"):
        path.unlink()
    put(hub.folder, "pytorch_model.bin", "")
    with pytest.raises(ModelError, match="neither safetensors weights nor a GGUF file in one part"):
        pull()
    assert files_asked(hub) == []


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ((500, ""), "cannot be fetched from the hub: it answers 500."),
        ((401, ""), "The hub has no model 'org/name'"),
        ((401, "RepoNotFound"), "The hub has no model 'org/name'"),
        ((403, "GatedRepo"), "org/name is gated"),
        ((401, "GatedRepo"), "org/name is gated"),
        ((404, "RevisionNotFound"), "has no revision 'v9'"),
        ((200, ""), "what the hub answers is not understood"),
    ],
)
def test_a_refusal_is_one_line(hub: FakeHub, refusal: tuple[int, str], message: str) -> None:
    hub.refusal = refusal
    with pytest.raises(ModelError) as raised:
        pull(revision="v9")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_hub_that_cannot_be_reached_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="org/name is not on this machine and cannot be fetched from the hub"):
        pull()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        pull()


def test_nothing_is_fetched_where_pulling_is_not_allowed(hub: FakeHub) -> None:
    with pytest.raises(ModelError, match=r"org/name is not installed\. Run `weft pull org/name`"):
        pull(allow_pull=False)
    assert hub.asked == []


def test_the_token_is_that_of_the_environment_or_of_who_logged_in(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hf_home").mkdir()
    (tmp_path / "hf_home" / "token").write_text("hf_file\n")
    pull()
    assert hub.tokens == {"Bearer hf_file"}
    hub.tokens.clear()
    monkeypatch.setenv("HF_TOKEN", "hf_told")
    pull(revision="v1")
    assert hub.tokens == {"Bearer hf_told"}


# Checked again.


def test_verify_fetches_what_is_damaged_and_nothing_else(hub: FakeHub) -> None:
    path = pull().path
    good = (path / SHARD).read_bytes()
    (path / SHARD).write_bytes(good[:-1] + b"!")
    hub.asked.clear()
    assert pull().path == path
    assert hub.asked == []
    assert (pull(verify=True).path / SHARD).read_bytes() == good
    assert files_asked(hub) == [SHARD]


# What the hub's own client has put on this machine.


@pytest.fixture
def their_cache(hub: FakeHub, tmp_path: Path) -> Path:
    """Written by the client itself, in a process of its own: it reads its environment once."""
    code = f"import huggingface_hub as h; print(h.snapshot_download('org/name', endpoint={hub.url!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    hub.asked.clear()
    return Path(done.stdout.strip())


def test_their_cache_is_used_as_it_is(hub: FakeHub, their_cache: Path, weft_home: Path, tmp_path: Path) -> None:
    assert their_cache.is_relative_to(tmp_path / "hf_home" / "hub" / "models--org--name")
    for revision in ("", "main", FIRST):
        files = pull(revision=revision, verify=True)
        assert (files.path, files.name, files.revision) == (their_cache, "org/name", FIRST)
    assert hub.asked == []
    assert not weft_home.exists()
    # A damaged file of theirs is named, and left for them.
    blob = (their_cache / SHARD).resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    with pytest.raises(ModelError, match=f"damaged or missing: {SHARD}"):
        pull(verify=True)
    # Where it is incomplete, the model is pulled; where that may not be, the file is named.
    blob.unlink()
    with pytest.raises(ModelError, match=f"1 of 2 weight files are missing: {SHARD}"):
        pull(allow_pull=False)
    assert pull().path == weft_home / "hub" / "org--name" / FIRST


def test_a_reference_that_leaves_the_cache_is_no_model(tmp_path: Path) -> None:
    refs = tmp_path / "hf_home" / "hub" / "models--org--name" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("../../../../secret")
    make_directory(tmp_path / "secret")
    with pytest.raises(ModelError, match="not installed"):
        pull(allow_pull=False)
    with pytest.raises(ModelError, match="not installed"):
        pull(revision="../refs/main", allow_pull=False)


def test_the_digests_that_were_noted_are_those_of_the_hub(hub: FakeHub) -> None:
    noted = json.loads((pull().path / ".digests.json").read_text())
    assert noted == {name: hub.digest(name) for name in hub.names()}
