"""Adapters by name through the native engine: from the operator's table to the tokens."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.generation import embed, sample
from tests.tiny_adapters import lora_tensors, save_adapter, save_merged
from tests.waiting import PATIENCE, until
from weft.backends.contract import final_output
from weft.backends.native import NativeEngine, start_native
from weft.checkpoint.adapter_files import adapter_settings, allowed_adapter
from weft.config import load
from weft.engine.process import EngineThread
from weft.errors import InvalidRequest, ModelError
from weft.hub.resolve import resolve
from weft.model.lora import read_adapter
from weft.types import LoadLora, Pooling, SamplingParams, UnloadLora

PROMPT = [(13 * i + 5) % 300 for i in range(20)]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


async def start(model: Path, adapters: dict[str, str], **more: Any) -> NativeEngine:
    settings = {"max_model_len": 256, "num_blocks": 64, "threads": 1, "image_model": "none", "device": "cpu"}
    config = load({**settings, "adapter": adapter_settings(adapters), **more}, env={})
    return await start_native(config, resolve(str(model)), launch=EngineThread)


async def told(engine: NativeEngine, adapter: str | None = None) -> list[int]:
    tokens: list[int] = []
    async for delta in await engine.submit(sample(PROMPT, GREEDY, adapter=adapter)):
        assert not delta.error
        tokens += delta.token_ids
    return tokens


def test_tc_008_requests_choose_an_adapter_by_name(tiny_model: Path, tmp_path: Path) -> None:
    red, blue = (str(save_adapter("smollm2", tmp_path / name, seed)) for name, seed in (("red", 1), ("blue", 2)))
    merged = save_merged("smollm2", tmp_path / "merged", lora_tensors("smollm2", 1), 2.0)

    async def scenario() -> None:
        reference = await start(merged, {})
        expected = await told(reference)
        vector = await final_output(await reference.submit(embed(PROMPT, Pooling.LAST)))
        await reference.close()
        engine = await start(tiny_model, {"red": red})
        try:
            await engine.control(LoadLora("default", blue))
            assert [adapter.number for adapter in engine.adapters] == [1, 2]
            answers = await asyncio.gather(*(told(engine, name) for name in ("red", "default", "", None)))
            assert answers[0] == expected and answers[1] == answers[3]
            assert len({tuple(answer) for answer in answers}) == 3
            found = await final_output(await engine.submit(embed(PROMPT, Pooling.LAST, adapter="red")))
            ours, theirs = (memoryview(one.embedding).cast("f").tolist() for one in (found, vector))
            assert ours == pytest.approx(theirs, abs=1e-4)
            await engine.control(UnloadLora("red"))
            with pytest.raises(InvalidRequest, match="no adapter 'red'"):
                await told(engine, "red")
            assert await told(engine) == answers[3]
        finally:
            await engine.close()

    asyncio.run(scenario())


def test_what_the_engine_cannot_use_is_refused_when_it_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    folder = save_adapter("smollm2", tmp_path / "adapter")
    facts = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**facts, "use_dora": True}))

    async def scenario() -> None:
        engine = await start(tiny_model, {})
        try:
            with pytest.raises(ModelError, match="use_dora is True"):
                await engine.control(LoadLora("a", str(folder)))
            assert not engine.adapters and len(await told(engine)) == 16
        finally:
            await engine.close()
        with pytest.raises(ModelError, match="use_dora is True"):
            await start(tiny_model, {"a": str(folder)})

    asyncio.run(scenario())


def test_a_load_that_is_given_up_leaves_no_adapter(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is held while it reads the adapter's files: the load cannot be done before it is given up."""
    folder = save_adapter("smollm2", tmp_path / "adapter")
    is_reading, go_on = threading.Event(), threading.Event()

    def read_when_told(*of_adapter: Any) -> Any:
        is_reading.set()
        assert go_on.wait(PATIENCE)
        return read_adapter(*of_adapter)

    monkeypatch.setattr("weft.worker.lora_rows.read_adapter", read_when_told)

    async def scenario() -> None:
        engine = await start(tiny_model, {})
        try:
            loading = asyncio.create_task(engine.control(LoadLora("a", str(folder))))
            await until(is_reading.is_set, "the engine reads the adapter")
            assert [adapter.number for adapter in engine.adapters] == [1]
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            assert not engine.adapters
            go_on.set()
            await engine.control(LoadLora("a", str(folder)))
            assert [adapter.number for adapter in engine.adapters] == [2]
        finally:
            await engine.close()

    asyncio.run(scenario())


def test_a_reader_that_fails_harms_nobody_else(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_adapter("smollm2", tmp_path / "adapter")

    def fails(*_: object) -> None:
        raise MemoryError("not enough of it")

    async def scenario() -> None:
        engine = await start(tiny_model, {})
        try:
            with monkeypatch.context() as broken:
                broken.setattr("weft.worker.lora_rows.read_adapter", fails)
                with pytest.raises(ModelError, match="MemoryError: not enough of it"):
                    await engine.control(LoadLora("a", str(folder)))
            assert len(await told(engine)) == 16 and engine.stats().restarts == 0
            await engine.control(LoadLora("a", str(folder)))
            assert len(await told(engine, "a")) == 16
        finally:
            await engine.close()

    asyncio.run(scenario())


def test_an_adapter_that_is_asked_for_over_the_network_is_below_an_allowed_folder(
    tiny_model: Path, tmp_path: Path
) -> None:
    own, shared, other = (save_adapter("smollm2", tmp_path / place / "adapter") for place in ("own", "shared", "other"))
    (tmp_path / "shared" / "link").symlink_to(other)
    escape = tmp_path / "shared" / "escape"
    escape.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (escape / name).symlink_to(other / name)

    async def scenario() -> None:
        engine = await start(tiny_model, {"own": str(own)}, adapter_root=[str(tmp_path / "shared")])

        async def load(path: str | Path) -> None:
            await engine.control(LoadLora("new", str(path), within_roots=True))
            await engine.control(UnloadLora("new"))

        try:
            for path in (shared, own, tmp_path / "other" / ".." / "shared" / "adapter"):
                await load(path)
            for path in (
                other, tmp_path / "shared/link", escape, tmp_path / "shared/../other/adapter", "/nowhere",
            ):  # fmt: skip
                with pytest.raises(InvalidRequest, match="--adapter-root") as refused:
                    await load(path)
                assert refused.value.param == "lora_path" and str(tmp_path) not in str(refused.value)
            await engine.control(LoadLora("other", str(other)))
        finally:
            await engine.close()

    asyncio.run(scenario())


def test_without_allowed_folders_it_is_the_folder_of_models(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    inside, outside = (save_adapter("smollm2", tmp_path / place / "adapter") for place in ("home", "outside"))
    config = load({}, env={})
    assert allowed_adapter(str(inside), config) == str(inside)
    with pytest.raises(InvalidRequest, match="--adapter-root"):
        allowed_adapter(str(outside), config)
    for nonsense in ("a\0b", "~no-such-user/a"):
        with pytest.raises(InvalidRequest, match="not the path of a folder"):
            allowed_adapter(nonsense, config)
