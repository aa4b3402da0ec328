"""Several scripted models in one pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from functools import partial
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests import virtual_time
from tests.api.scripted_engine import ScriptedEngine, answer
from tests.waiting import until
from weft.api.app import admission_app
from weft.backends.contract import Engine, FreeMemory, Need, StageReport
from weft.config import load
from weft.errors import ConfigError, OutOfMemory
from weft.options import Config, ModelEntry
from weft.serving import model_pool
from weft.serving.admission import Admission
from weft.serving.model_slot import ModelSlot


def entry(name: str, config: Config, **fields: Any) -> ModelEntry:
    own = replace(config, model=replace(config.model, served_model_name=name))
    return ModelEntry(name=name, config=own, **fields)


class ScriptedRoster:
    """Its models say their names; loads take as long as `pauses` say, and fail as `faults` say."""

    def __init__(self, names: Iterable[str], config: Config) -> None:
        self.config = config
        self.entries = {name: entry(name, config) for name in names}
        self.default = next(iter(self.entries))
        self.memory_limit = 0
        self.needs: dict[str, Need] = {}
        self.pauses: dict[str, asyncio.Event] = {}
        self.faults: dict[str, Exception] = {}
        self.scripts: dict[str, Any] = {}
        self.started: list[str] = []
        self.engines: dict[str, ScriptedEngine] = {}
        self.make_room: dict[str, FreeMemory] = {}
        self.next: dict[str, ModelEntry] | None = None
        """What the file says when it is read again."""
        self.is_broken = False
        self.num_looks = 0
        """How often the pool has looked whether the file has changed."""

    def refresh(self) -> bool:
        self.num_looks += 1
        if self.next is None or self.is_broken:
            return False
        self.reload()
        return True

    def reload(self) -> None:
        if self.is_broken:
            raise ConfigError("models.toml:3: there is no key 'x'.")
        if self.next is not None:
            self.entries, self.next = self.next, None
            self.default = next(iter(self.entries))

    def fault(self, entry: ModelEntry) -> str:
        return ""

    async def need(self, entry: ModelEntry, report: StageReport) -> Need:
        return self.needs.get(entry.name, Need())

    async def start(self, entry: ModelEntry, report: StageReport, make_room: FreeMemory) -> Engine:
        name = entry.name
        self.started.append(name)
        self.make_room[name] = make_room
        report("load")
        if name in self.pauses:
            await self.pauses[name].wait()
        if fault := self.faults.get(name):
            if isinstance(fault, OutOfMemory) and await make_room(fault.message):
                return await self.start(entry, report, make_room)
            raise fault
        engine = ScriptedEngine(self.scripts.get(name, answer(f"I am {name}")))
        engine.model = replace(engine.model, name=name)
        self.engines[name] = engine
        return engine


class ServedPool:
    def __init__(self, admission: Admission, roster: ScriptedRoster, client: httpx.AsyncClient) -> None:
        self.admission = admission
        self.roster = roster
        self.client = client

    def slot(self, name: str) -> ModelSlot:
        return self.admission.pool.named(name)

    async def looks_twice(self) -> None:
        """Return when the pool has looked after its models twice more."""
        before = self.roster.num_looks
        await until(lambda: self.roster.num_looks >= before + 2, "the pool's next looks")

    def states(self) -> dict[str, str]:
        return {slot.name: slot.state for slot in self.admission.pool.slots}

    async def ask(self, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def said(self, model: str) -> str:
        response = await self.ask(model)
        assert response.status_code == 200, response.text
        assert response.json()["model"] == model
        text: str = response.json()["choices"][0]["message"]["content"]
        return text


@contextlib.asynccontextmanager
async def served_pool(
    *names: str, prepare: Callable[[ScriptedRoster], None] | None = None, **flags: Any
) -> AsyncIterator[ServedPool]:
    """It has started, or its start waits for one of the roster's pauses. Its models have the loop's clock."""
    config = load(flags, env={})
    roster = ScriptedRoster(names, config)
    if prepare is not None:
        prepare(roster)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_pool, "ModelSlot", partial(ModelSlot, clock=virtual_time.now))
        async with _opened(Admission(config, roster), roster) as opened:
            yield opened


@contextlib.asynccontextmanager
async def _opened(admission: Admission, roster: ScriptedRoster) -> AsyncIterator[ServedPool]:
    transport = httpx.ASGITransport(admission_app(admission))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        starting = asyncio.create_task(admission.pool.start())
        await until(lambda: starting.done() or {*roster.started} & roster.pauses.keys(), "the start")
        try:
            yield ServedPool(admission, roster, client)
        finally:
            starting.cancel()
            await asyncio.wait({starting})
            await admission.close()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """On the virtual clock. The pool's watch goes on for ever, and a scenario that waits in vain is ended."""
    virtual_time.run(asyncio.wait_for(scenario(), 3600))
