"""The engine process and the text room start side by side, and the first error ends both."""

from __future__ import annotations

import asyncio
import gc
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE, until
from weft.backends import native
from weft.backends.model_text import ModelText, open_model_text
from weft.backends.native import start_native
from weft.config import load
from weft.engine.process import LaunchedEngine
from weft.errors import EngineFault, ModelError
from weft.options import Config


class SilentEngine:
    """Loads for as long as it is left to: a start that waits for it never ends."""

    pid: int | None = None

    def __init__(self) -> None:
        self.socket, self._theirs = socket.socketpair()

    def kill(self) -> None:
        self._theirs.close()

    def wait(self, timeout_s: float) -> str | None:
        return "killed" if self._theirs.fileno() < 0 else None


def no_engine() -> LaunchedEngine:
    raise EngineFault("There is no room for a process.")


@pytest.fixture
def broken_model(tiny_model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "broken"
    shutil.copytree(tiny_model, folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def config_of(model: Path) -> Config:
    return load({"model": str(model), "image_model": "none", "start_timeout_s": 3600.0}, env={})


def run(scenario: Callable[[], Any]) -> list[dict[str, Any]]:
    """What the event loop complains of."""
    complaints: list[dict[str, Any]] = []

    async def whole() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        await asyncio.wait_for(scenario(), PATIENCE)
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(whole())
    return complaints


def test_a_broken_tokenizer_is_told_of_before_the_weights_are_loaded(broken_model: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ModelError, match="tokenizer"):
            await start_native(config_of(broken_model), launch=SilentEngine)

    assert run(scenario) == []


def test_of_two_errors_one_is_raised_and_none_forgotten(broken_model: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(EngineFault, match="no room"):
            await start_native(config_of(broken_model), launch=no_engine)

    assert run(scenario) == []


def test_the_room_is_closed_when_the_start_is_given_up(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[ModelText] = []
    closed: list[ModelText] = []

    def open_it(*words: Any) -> ModelText:
        room = open_model_text(*words)
        opened.append(room)
        return room

    monkeypatch.setattr(native, "open_model_text", open_it)
    monkeypatch.setattr(ModelText, "close", lambda room: closed.append(room))

    async def scenario() -> None:
        with pytest.raises(EngineFault, match="no room"):
            await start_native(config_of(tiny_model), launch=no_engine)
        assert len(opened) == 1 and closed == opened
        starting = asyncio.create_task(start_native(config_of(tiny_model), launch=SilentEngine))
        await until(lambda: len(opened) == 2, "the text room is open")
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert closed == opened

    assert run(scenario) == []
