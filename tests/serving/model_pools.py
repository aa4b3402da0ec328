"""Several scripted models behind one gate."""

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
    """Its models say their names; loads take as long as `gates` say, and fail as `faults` say."""

    def __init__(self, names: Iterable[str], config: Config) -> None:
        self.config = config
        self.entries = {name: entry(name, config) for name in names}
        self.default = next(iter(self.entries))
        self.memory_limit = 0
        self.needs: dict[str, Need] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.faults: dict[str, Exception] = {}
        self.scripts: dict[str, Any] = {}
        self.started: list[str] = []
        self.engines: dict[str, ScriptedEngine] = {}
        self.make_room: dict[str, FreeMemory] = {}
        self.next: dict[str, ModelEntry] | None = None
        """What the file says when it is read again."""
        self.is_broken = False
        self.num_looks = 0
        """How often the fleet has looked whether the file has changed."""

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
        if name in self.gates:
            await self.gates[name].wait()
        if fault := self.faults.get(name):
            if isinstance(fault, OutOfMemory) and await make_room(fault.message):
                return await self.start(entry, report, make_room)
            raise fault
        engine = ScriptedEngine(self.scripts.get(name, answer(f"I am {name}")))
        engine.model = replace(engine.model, name=name)
        self.engines[name] = engine
        return engine


class House:
    def __init__(self, gate: Admission, roster: ScriptedRoster, client: httpx.AsyncClient) -> None:
        self.gate = gate
        self.roster = roster
        self.client = client

    def slot(self, name: str) -> ModelSlot:
        return self.gate.pool.named(name)

    async def looks_twice(self) -> None:
        """Return when the fleet has looked after its models twice more."""
        before = self.roster.num_looks
        await until(lambda: self.roster.num_looks >= before + 2, "the fleet's next looks")

    def states(self) -> dict[str, str]:
        return {slot.name: slot.state for slot in self.gate.pool.slots}

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
async def house(
    *names: str, prepare: Callable[[ScriptedRoster], None] | None = None, **flags: Any
) -> AsyncIterator[House]:
    """It has started, or its start waits for one of the roster's gates. Its models have the loop's clock."""
    config = load(flags, env={})
    roster = ScriptedRoster(names, config)
    if prepare is not None:
        prepare(roster)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_pool, "ModelSlot", partial(ModelSlot, clock=virtual_time.now))
        async with _opened(Admission(config, roster), roster) as opened:
            yield opened


@contextlib.asynccontextmanager
async def _opened(gate: Admission, roster: ScriptedRoster) -> AsyncIterator[House]:
    transport = httpx.ASGITransport(admission_app(gate))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        starting = asyncio.create_task(gate.pool.start())
        await until(lambda: starting.done() or {*roster.started} & roster.gates.keys(), "the start")
        try:
            yield House(gate, roster, client)
        finally:
            starting.cancel()
            await asyncio.wait({starting})
            await gate.close()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """On the virtual clock. The fleet's watch goes on for ever, and a scenario that waits in vain is ended."""
    virtual_time.run(asyncio.wait_for(scenario(), 3600))
