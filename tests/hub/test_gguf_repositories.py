"""GGUF files of a hub: one of a repository by its quantisation, short names for well-known ones, and their removal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.checkpoint.gguf_bytes import small_model
from tests.hub.fake_directory import make_directory
from tests.hub.fake_hub import FakeHub, serving
from weft.cli import main as cli
from weft.errors import ModelError
from weft.hub.catalog import CATALOGUE
from weft.hub.hub_api import GGUF_ID, HUB_ID
from weft.hub.resolve import pull_by_name, remove, resolve
from weft.hub.short_names import SHORT_NAMES, TABLE
from weft.hub.snapshots import list_models

FIRST, SECOND = "1" * 40, "2" * 40
SMALL, LARGE = "name-Q4_K_M.gguf", "name-q8_0.gguf"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A repository of GGUF files alone, as their makers publish them."""
    folder = tmp_path / "remote"
    folder.mkdir()
    for name in (SMALL, LARGE, "name-F16-00001-of-00002.gguf", "mmproj-name-f16.gguf"):
        (folder / name).write_bytes(small_model())
    (folder / "README.md").write_text("text")
    with serving(FakeHub(folder)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def files_asked(hub: FakeHub) -> list[str]:
    return [path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path]


def test_a_quantisation_names_one_file_of_a_repository(hub: FakeHub, weft_home: Path) -> None:
    files = resolve("org/name:Q8_0", progress=False)
    assert (files.name, files.kind, files.revision) == ("org/name:q8_0", "gguf", FIRST)
    assert files.path == weft_home / "hub" / "org--name" / FIRST / LARGE
    assert files_asked(hub) == [LARGE]
    # The name that is listed, the file's own name and the other hosts' way to write it all mean that file.
    hub.refusal = (503, "")
    for name in (files.name, f"org/name:{LARGE}", "huggingface:org/name:Q8_0", "https://huggingface.co/org/name:Q8_0"):
        assert resolve(name, progress=False, allow_pull=False).path == files.path
    assert pull_by_name("hf.co/org/name:Q8_0", lambda progress: None).path == files.path


def test_without_one_the_usual_quantisation_is_taken(hub: FakeHub) -> None:
    assert resolve("org/name", progress=False).path.name == SMALL
    resolve("org/name:Q8_0", progress=False)
    assert resolve("org/name", progress=False, allow_pull=False).path.name == SMALL
    assert [(model.name, model.path.name) for model in list_models()] == [
        ("org/name:Q4_K_M", SMALL),
        ("org/name:q8_0", LARGE),
    ]


def test_a_quantisation_that_is_not_there_names_those_that_are(hub: FakeHub) -> None:
    with pytest.raises(ModelError, match="no GGUF file Q2_K; it has Q4_K_M, q8_0") as raised:
        resolve("org/name:Q2_K", progress=False)
    assert raised.value.hint == "Name one, as in org/name:Q4_K_M."


def test_each_file_stays_pinned_to_its_own_commit(hub: FakeHub) -> None:
    resolve("org/name:Q4_K_M", progress=False)
    hub.commits = {"main": SECOND, SECOND: SECOND}
    assert resolve("org/name:Q8_0", progress=False).revision == SECOND
    hub.refusal = (503, "")
    assert resolve("org/name:Q4_K_M", progress=False).revision == FIRST
    assert resolve("org/name:Q8_0", progress=False).revision == SECOND


def test_a_repository_with_safetensors_gives_those_unless_a_file_is_named(hub: FakeHub) -> None:
    make_directory(hub.folder)
    assert resolve("org/name", progress=False).kind == "huggingface"
    assert resolve("org/name:Q4_K_M", progress=False).path.name == SMALL
    assert {model.name for model in list_models()} == {"org/name", "org/name:Q4_K_M"}


def test_a_damaged_file_is_fetched_again(hub: FakeHub) -> None:
    path = resolve("org/name:Q8_0", progress=False).path
    resolve("org/name:Q4_K_M", progress=False)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    hub.asked.clear()
    assert resolve("org/name:Q8_0", progress=False, verify=True).path.read_bytes() == small_model()
    assert files_asked(hub) == [LARGE]


@pytest.mark.parametrize("name", ["qwen3:0.6b", "llama3.2", "mistral:latest"])
def test_a_short_name_is_pulled_and_pinned(hub: FakeHub, name: str) -> None:
    short = SHORT_NAMES[name]
    (hub.folder / short.file).write_bytes(small_model())
    hub.hub_id = short.hub_id
    files = resolve(name, progress=False)
    assert (files.name, files.path.name, files.revision) == (short.name, short.file, FIRST)
    hub.refusal = (503, "")
    assert resolve(short.name, progress=False) == files
    assert [model.name for model in list_models()] == [short.name]


def test_the_commands_pull_list_and_remove_it(hub: FakeHub) -> None:
    short = SHORT_NAMES["qwen3:0.6b"]
    (hub.folder / short.file).write_bytes(small_model())
    hub.hub_id = short.hub_id
    runner = CliRunner(env={"COLUMNS": "300", "NO_COLOR": "1"})
    pulled = runner.invoke(cli.app, ["pull", short.name]).output
    assert re.search(rf"qwen3:0\.6b is at \S+/{re.escape(short.file)}\n", pulled)
    assert re.search(r"qwen3:0\.6b +gguf .*1{12}", runner.invoke(cli.app, ["models"]).output)
    assert re.search(r"qwen3:0\.6b .* installed", runner.invoke(cli.app, ["models", "--all"]).output)
    assert runner.invoke(cli.app, ["rm", "qwen3:0.6b"]).output.startswith("qwen3:0.6b is removed: ")
    assert "qwen3" not in runner.invoke(cli.app, ["models"]).output


def test_the_table_names_each_file_once_and_nothing_that_means_something_else() -> None:
    assert len({model.name for model in TABLE}) == len({(model.hub_id, model.file) for model in TABLE}) == len(TABLE)
    assert all(HUB_ID.fullmatch(model.hub_id) and GGUF_ID.fullmatch(f"{model.hub_id}:{model.file}") for model in TABLE)
    assert not SHORT_NAMES.keys() & CATALOGUE.keys()
    assert not any("/" in name or not name for name in SHORT_NAMES)


def test_a_name_that_is_nearly_one_is_suggested() -> None:
    with pytest.raises(ModelError, match=r"Did you mean 'qwen3:0\.6b'"):
        resolve("qwen3:0.6", progress=False)


# Removal.


def test_one_file_is_removed_and_the_other_stays(hub: FakeHub, weft_home: Path) -> None:
    resolve("org/name:Q4_K_M", progress=False)
    resolve("org/name:Q8_0", progress=False)
    assert remove("org/name:Q8_0") == len(small_model())
    assert [model.name for model in list_models()] == ["org/name:Q4_K_M"]
    remove("org/name:Q4_K_M")
    assert list_models() == []
    assert not (weft_home / "hub" / "org--name" / FIRST).exists()
    with pytest.raises(ModelError, match="not installed"):
        resolve("org/name:Q4_K_M", progress=False, allow_pull=False)


def test_a_hub_model_is_removed_with_all_its_commits_or_with_one(hub: FakeHub, weft_home: Path) -> None:
    make_directory(hub.folder)
    hub.commits |= {"v2": SECOND}
    resolve("org/name", progress=False)
    resolve("org/name", "v2", progress=False)
    assert remove("org/name", "v2") > 0
    assert [model.revision for model in list_models()] == [FIRST]
    resolve("org/name", "v2", progress=False)
    assert remove("org/name") > 0
    assert list_models() == [] and not (weft_home / "hub" / "org--name").exists()


def test_a_model_of_the_folder_is_removed_by_its_name(weft_home: Path) -> None:
    folder = weft_home / "models" / "mine"
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(small_model())
    assert remove("mine") == len(small_model())
    assert not folder.exists()


@pytest.mark.parametrize("name", ["org/name", "smollm2", "llama3.2:1b"])
def test_what_is_not_there_is_not_removed(name: str) -> None:
    with pytest.raises(ModelError, match="not installed"):
        remove(name)


def test_a_path_is_never_removed(tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(small_model())
    for name in (str(file), str(tmp_path), "..", "../x", ""):
        with pytest.raises(ModelError):
            remove(name)
    assert file.exists()
