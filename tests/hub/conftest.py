from __future__ import annotations

from pathlib import Path

import pytest

from tests.hub import fake_model
from weft.hub import catalog, pip


@pytest.fixture(autouse=True)
def weft_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own for every test, and the tiny model in the catalogue."""
    folder = tmp_path / "home"
    monkeypatch.setenv("WEFT_HOME", str(folder))
    monkeypatch.setitem(catalog.CATALOGUE, fake_model.NAME, fake_model.MODEL)
    # Put back after the test what fake_pip replaces.
    monkeypatch.setattr(pip, "pip_command", pip.pip_command)
    return folder
