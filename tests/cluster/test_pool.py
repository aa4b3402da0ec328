"""The pool of replicas at an edge: what it holds against a request, and what a table's change does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.cluster.test_link import KEY, Served, on_a_loop, request, served
from tests.engine.test_client import FILES
from tests.waiting import PATIENCE, until
from weft.cluster.membership import ReplicaAddress, ReplicaState, ReplicaTable
from weft.cluster.replica_pool import ReplicaPool
from weft.engine.journal import Place
from weft.engine.wire import StepOutput
from weft.engine_stats import EngineStats
from weft.options import Config, EngineOptions, SchedulerOptions
from weft.types import Event, FinishReason


class Told:
    """A membership whose tables a test writes. It fails where the test says so."""

    def __init__(self) -> None:
        self.key = KEY
        self._tables: asyncio.Queue[ReplicaTable | None] = asyncio.Queue()
        self._version = 0

    def tell(self, *replicas: tuple[Served, ReplicaState]) -> None:
        self._version += 1
        addresses = [
            ReplicaAddress(str(one.server.port), "127.0.0.1", one.server.port, state=state) for one, state in replicas
        ]
        self._tables.put_nowait(ReplicaTable(self._version, tuple(addresses)))

    def fail(self) -> None:
        self._tables.put_nowait(None)

    async def tables(self) -> AsyncIterator[ReplicaTable]:
        while (table := await self._tables.get()) is not None:
            yield table
        raise ConnectionError("the membership is gone")

    async def close(self) -> None:
        pass


@asynccontextmanager
async def pool_of(told: Told) -> AsyncIterator[ReplicaPool]:
    pool = ReplicaPool(Config(engine=EngineOptions(heartbeat_timeout_s=PATIENCE)), FILES, told)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def cut(replica: Served) -> None:
    """Close the connections of a replica, as its death does."""
    for edge in replica.server._edges:
        edge.link.abort()


async def hand_out(replica: Served, tokens: dict[str, int]) -> None:
    """Let the engine give tokens to the requests whose ids end so."""
    events = [
        Event(request_id=name, token_ids=[token], cached_tokens=0)
        for name in replica.server.client._journal._entries
        for suffix, token in tokens.items()
        if name.endswith(suffix)
    ]
    await asyncio.to_thread(replica.engine.send, StepOutput({}, events, EngineStats()))


@on_a_loop
async def test_a_request_that_three_replicas_are_lost_with_is_refused_alone() -> None:
    told = Told()
    async with served() as replica:
        told.tell((replica, "ready"))
        async with pool_of(told) as pool:
            poison, other = pool.submit(request("poison")), pool.submit(request("other"))
            for life in (1, 2):
                ids = {(await replica.submitted()).request_id.partition(".")[2] for _ in range(2)}
                assert ids == {"poison", "other"}
                await hand_out(replica, {"other": life})
                await until(lambda n=life: len(other.delivered) == n)
                cut(replica)
                await until(lambda n=life: poison.deaths == n)
            # Now the suspect is on trial. The other one was proven every time, and is none.
            assert {(await replica.submitted()).request_id.partition(".")[2] for _ in range(2)} == {"poison", "other"}
            cut(replica)
            await until(lambda: not poison.is_open)
            (last,) = poison.take()
            assert isinstance(last, Event) and last.finish is FinishReason.ERROR and "3 replicas" in last.error
            assert other.is_open


@on_a_loop
async def test_what_a_table_takes_away_is_no_evidence() -> None:
    told = Told()
    async with served() as one, served() as two:
        told.tell((one, "ready"))
        async with pool_of(told) as pool:
            entry = pool.submit(request("a"))
            await one.submitted()
            for here, there in ((one, two), (two, one)) * 3:
                told.tell((here, "dead"), (there, "ready"))
                assert (await there.submitted()).request_id.endswith("a")
                await until(lambda left=here: left.server.num_edges == 0, "the edge's leaving")
            assert entry.is_open and entry.deaths == 0


@on_a_loop
async def test_a_draining_replica_keeps_its_requests_and_gets_no_new_ones() -> None:
    told = Told()
    async with served() as one, served() as two:
        told.tell((one, "ready"))
        async with pool_of(told) as pool:
            old = pool.submit(request("old"))
            await one.submitted()
            told.tell((one, "draining"), (two, "ready"))
            await until(lambda: len(pool.ready_ids) == 1 and pool.ready_ids != [str(one.server.port)])
            for number in range(8):
                pool.submit(request(f"new-{number}"))
                assert (await two.submitted()).request_id.endswith(f"new-{number}")
            await hand_out(one, {"old": 5})
            await until(lambda: old.delivered == [5])
            assert one.engine.inbox.empty()


@on_a_loop
async def test_a_replica_that_drains_by_itself_gets_no_new_ones() -> None:
    told = Told()
    async with served() as one, served() as two:
        told.tell((one, "ready"), (two, "ready"))
        async with pool_of(told) as pool:
            await until(lambda: len(pool.ready_ids) == 2)
            one.server.drain()
            # Whether or not the edge knows yet: what is not taken goes elsewhere.
            for number in range(4):
                pool.submit(request(f"new-{number}"))
            ids = {(await two.submitted()).request_id.partition(".")[2] for _ in range(4)}
            assert ids == {f"new-{number}" for number in range(4)}


@on_a_loop
async def test_without_a_membership_the_last_table_holds() -> None:
    told = Told()
    async with served() as one:
        told.tell((one, "ready"))
        async with pool_of(told) as pool:
            told.fail()
            entry = pool.submit(request("a"))
            await one.submitted()
            cut(one)
            assert (await one.submitted()).request_id.endswith("a")
            assert entry.is_open


@on_a_loop
async def test_the_replicas_of_a_new_cluster_may_have_another_key() -> None:
    """The head of a Ray cluster that comes back with an empty state has a new controller, which makes a key."""
    told = Told()
    async with served() as one, served(key=b"another" * 8) as two:
        told.tell((one, "ready"))
        async with pool_of(told) as pool:
            entry = pool.submit(request("a"))
            await one.submitted()
            told.key = b"another" * 8
            told.tell((two, "ready"))
            assert (await two.submitted()).request_id.endswith("a")
            assert entry.is_open


@on_a_loop
async def test_siblings_go_where_their_leader_is() -> None:
    told = Told()
    async with served() as one, served() as two:
        told.tell((one, "ready"), (two, "ready"))
        async with pool_of(told) as pool:
            await until(lambda: len(pool.ready_ids) == 2)
            for number in range(6):
                pool.submit(request(f"leader-{number}"))
                pool.submit(request(f"sibling-{number}", sibling_of=f"leader-{number}"))
            await until(lambda: one.server.num_open + two.server.num_open == 12)
            where = [{name.partition(".")[2] for name in each.server.client._journal._entries} for each in (one, two)]
            for number in range(6):
                assert any({f"leader-{number}", f"sibling-{number}"} <= names for names in where)


@on_a_loop
async def test_a_tenant_that_a_replica_takes_no_more_of_holds_up_no_other() -> None:
    told = Told()
    async with served() as one:
        one.server.client.config = Config(
            engine=EngineOptions(heartbeat_timeout_s=PATIENCE), scheduler=SchedulerOptions(max_queued_requests=2)
        )
        told.tell((one, "ready"))
        async with pool_of(told) as pool:
            flood = [pool.submit(request(f"flood-{number}", tenant="flood")) for number in range(6)]
            await until(lambda: bool(pool._full), "the replica's refusal")
            assert pool.submit(request("more", tenant="flood")).place is Place.HELD
            assert pool.submit(request("light", tenant="light")).place is Place.QUEUED
            await until(lambda: any(name.endswith("light") for name in one.server.client._journal._entries))
            assert sum(entry.is_open for entry in flood) == 6, "those that are not taken wait at the edge"


@on_a_loop
async def test_requests_of_one_session_go_to_one_replica() -> None:
    told = Told()
    async with served() as one, served() as two, served() as three:
        told.tell((one, "ready"), (two, "ready"), (three, "ready"))
        async with pool_of(told) as pool:
            await until(lambda: len(pool.ready_ids) == 3)
            where = {"a": set[str](), "b": set[str](), "": set[str]()}
            for number in range(36):
                session = ("a", "b", "")[number % 3]
                pool.submit(request(str(number), session=session))
                where[session].add(pool._where[str(number)][0].id)
                if session:
                    pool.abort(str(number))
            assert len(where["a"]) == len(where["b"]) == 1 and len(where[""]) == 3


@on_a_loop
async def test_the_prompt_of_a_request_that_moved_waits_until_its_next_token() -> None:
    """Of one that goes on an engine sends plain tokens, and no event that is its first."""
    told = Told()
    async with served() as one, served() as two:
        told.tell((one, "ready"))
        async with pool_of(told) as pool:
            entry = pool.submit(request("a"))
            await one.submitted()
            await hand_out(one, {"a": 1})
            await until(lambda: len(entry.delivered) == 1)
            told.tell((one, "dead"), (two, "ready"))
            name = (await two.submitted()).request_id
            replica, route = pool._where["a"]
            assert pool._router._replicas[replica.id].open[route].waits
            await asyncio.to_thread(two.engine.send, StepOutput({name: 2}, [], EngineStats()))
            await until(lambda: len(entry.delivered) == 2)
            assert not pool._router._replicas[replica.id].open[route].waits
