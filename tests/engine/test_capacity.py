"""Who still gets into a full queue: a tenant that has less than its equal share of it, up to twice the limit."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.stand_in import StandIns
from tests.engine.test_client import FILES, submitted, until
from weft.config import load
from weft.engine.client import EngineClient, check_capacity
from weft.engine.journal import Waiting, queued_tokens
from weft.errors import Overloaded
from weft.options import SchedulerOptions
from weft.types import Pooling, Request, SamplingParams


def request(name: str, tenant: str = "", num_tokens: int = 1, **details: object) -> Request:
    params = SamplingParams(max_tokens=1, seed=0)
    return Request(request_id=name, prompt_token_ids=[1] * num_tokens, params=params, tenant=tenant, **details)


def check(waiting: Waiting, asked: Request, limits: SchedulerOptions) -> None:
    check_capacity(waiting, asked.tenant, queued_tokens(asked), limits)


def admitted(tenants: list[str], limits: SchedulerOptions, num_tokens: int = 1) -> list[str]:
    """The tenants of those that get in, one after the other, while nobody leaves."""
    waiting, got_in = Waiting(), list[str]()
    for i, tenant in enumerate(tenants):
        asked = request(str(i), tenant, num_tokens)
        try:
            check(waiting, asked, limits)
        except Overloaded:
            continue
        waiting.add(asked)
        got_in.append(tenant)
    return got_in


def waiting_with(*requests: Request) -> Waiting:
    waiting = Waiting()
    for one in requests:
        waiting.add(one)
    return waiting


def test_one_tenant_has_the_whole_queue_and_no_more() -> None:
    assert len(admitted(["a"] * 20, SchedulerOptions(max_queued_requests=8))) == 8
    assert len(admitted(["a"] * 20, SchedulerOptions(max_queued_tokens=80), 10)) == 8


@pytest.mark.parametrize(
    ("limits", "num_tokens"),
    [(SchedulerOptions(max_queued_requests=8), 1), (SchedulerOptions(max_queued_tokens=80), 10)],
    ids=["requests", "tokens"],
)
def test_a_tenant_below_its_share_gets_in(limits: SchedulerOptions, num_tokens: int) -> None:
    got = admitted(["a"] * 8 + ["b"] * 8 + ["a"] + ["c"] * 8, limits, num_tokens)
    assert got == ["a"] * 8 + ["b"] * 4 + ["c"] * 2


def test_a_prompt_larger_than_a_share_does_not_get_in() -> None:
    limits = SchedulerOptions(max_queued_tokens=100)
    waiting = waiting_with(request("a", "a", 100))
    check(waiting, request("b", "b", 50), limits)
    with pytest.raises(Overloaded, match="Prompts of 100 tokens"):
        check(waiting, request("b", "b", 51), limits)


def test_the_prompt_of_siblings_is_counted_once() -> None:
    limits = SchedulerOptions(max_queued_tokens=100)
    waiting = waiting_with(request("leader", num_tokens=100))
    check(waiting, request("sibling", num_tokens=100, sibling_of="leader"), limits)
    with pytest.raises(Overloaded):
        check(waiting, request("stranger", num_tokens=1), limits)


@given(tenants=st.lists(st.sampled_from([*"abcdefgh"]), max_size=200), limit=st.integers(1, 20))
def test_the_queue_never_has_twice_its_limit(tenants: list[str], limit: int) -> None:
    got = admitted(tenants, SchedulerOptions(max_queued_requests=limit))
    assert len(got) <= 2 * limit
    assert got[:limit] == tenants[:limit], "nobody is refused before the limit"


def test_the_client_lets_in_who_has_less_than_its_share() -> None:
    async def scenario() -> None:
        client = EngineClient(load({"max_queued_requests": 4}, env={}), FILES, StandIns())
        await client.start()
        for i in range(4):
            client.submit(request(f"a{i}", "a"))
        with pytest.raises(Overloaded, match="4 requests are waiting"):
            client.submit(request("a4", "a"))
        client.submit(request("b0", "b"))
        client.submit(request("b1", "b"))
        with pytest.raises(Overloaded):
            client.submit(request("b2", "b"))
        await client.close()

    asyncio.run(scenario())


def test_a_request_for_a_vector_survives_its_engine() -> None:
    async def scenario() -> None:
        launch = StandIns()
        client = EngineClient(load(env={}), FILES, launch)
        await client.start()
        asked = request("r", num_tokens=3, pooling=Pooling.MEAN)
        client.submit(asked)
        assert await submitted(launch.launched[0]) == [asked]
        launch.launched[0].kill()
        await until(lambda: len(launch.launched) == 2 and client.state == "ready")
        assert await submitted(launch.launched[1]) == [asked]
        await client.close()

    asyncio.run(scenario())
