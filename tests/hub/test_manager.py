"""The model of a configuration is found for every engine alike, with the stages that a load reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hub.fake_directory import make_directory
from tests.hub.fake_hub import FakeHub, serving
from weft.backends.safe_loading import LoadStage, check_load
from weft.errors import ModelError
from weft.hub import download
from weft.hub.progress import Progress
from weft.hub.resolve import find_model
from weft.options import BackendOptions, Config, ModelOptions


def config(model: str, **options: str) -> Config:
    return Config(
        model=ModelOptions(model=model, image_model="none", device="cpu", **options),  # type: ignore[arg-type]
        backend=BackendOptions(engine="native"),
    )


def test_a_model_on_this_machine_is_checked(tmp_path: Path) -> None:
    folder = make_directory(tmp_path / "mine")
    heard: list[Progress] = []
    assert find_model(config(str(folder)), heard.append).path == folder
    assert heard == [Progress("resolve", note=str(folder)), Progress("verify", note=str(folder))]
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"weight files are missing: model-00001-of-00002\.safetensors"):
        find_model(config(str(folder)))
    assert find_model(config(str(folder), load_format="dummy")).kind == "dummy"
    both = find_model(config(str(folder), load_format="dummy", speculative_model=str(folder)))
    assert both.draft == find_model(config(str(folder), load_format="dummy"))


def test_code_is_fetched_only_by_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_directory(tmp_path / "remote")
    (folder / "config.json").write_text('{"auto_map": {}}')
    (folder / "code.py").write_text("")
    with serving(FakeHub(folder)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert not list(find_model(config("org/name")).path.glob("*.py"))
        trusting = Config(model=ModelOptions(model="org/name"), backend=BackendOptions(trust_remote_code=True))
        assert list(find_model(trusting).path.glob("*.py"))


def test_a_load_tells_the_stages_of_the_hub(
    tiny_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[LoadStage] = []
    with serving(FakeHub(tiny_directory("smollm2"))) as hub:
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
        plan = asyncio.run(check_load(config("modelscope:org/name"), report=heard.append))
    assert plan is not None
    assert plan.model == "org/name"
    assert list(dict.fromkeys(stage.stage for stage in heard)) == ["resolve", "download", "verify", "plan"]
    ends = {stage.stage: stage for stage in heard}
    assert ends["download"].done == ends["download"].total == ends["verify"].done > 1000


def test_a_load_whose_download_stalls_says_which(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(download, "STALL_SECONDS", 0.3)
    with serving(FakeHub(make_directory(tmp_path / "remote"))) as hub:
        hub.hangs = True
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(ModelError, match="The download of org/name stalled"):
            asyncio.run(check_load(config("org/name")))
