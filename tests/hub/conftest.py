from __future__ import annotations

from pathlib import Path

import pytest

from tests.hub import fake_model
from weft.hub import catalog
from weft.hub import catalog as pip


@pytest.fixture(autouse=True)
def weft_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a home folder of its own, and the tiny model in the catalogue."""
    folder = tmp_path / "home"
    monkeypatch.setenv("WEFT_HOME", str(folder))
    # Neither what else is on this machine nor a hub is seen.
    for name in ("HF_HOME", "MODELSCOPE_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    for name in ("HF_ENDPOINT", "MODELSCOPE_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "MODELSCOPE_API_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(catalog.CATALOGUE, fake_model.NAME, fake_model.MODEL)
    # Put back after the test what fake_pip replaces.
    monkeypatch.setattr(pip, "pip_command", pip.pip_command)
    return folder
