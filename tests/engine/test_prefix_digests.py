"""What an engine publishes of its prefix cache is what an edge computes for the same prompt."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.effort import EFFORT
from tests.engine.stand_in import StandIns
from tests.engine.test_client import FILES
from tests.scheduler.simulation import Simulation, embeds, limits, request
from tests.waiting import until
from weft.config import load
from weft.engine.client import EngineClient
from weft.engine.wire import PrefixDigests
from weft.hub.resolve import resolve
from weft.payloads import EmbedsSegment
from weft.plan import Limits
from weft.scheduler.block_pool import BlockPool
from weft.scheduler.prefix_digests import PublishedKeys, prompt_digests, tokens_per_digest
from weft.types import Adapter, MixedPrompt, Pooling, Request, ResetPrefixCache, SamplingParams

PROMPT = [(i * 7 + i // 50) % 29 for i in range(398)]


class Heard:
    """The digests that hold after all messages so far."""

    def __init__(self) -> None:
        self.digests: set[bytes] = set()
        self.resets = 0

    def __call__(self, message: PrefixDigests) -> None:
        if message.reset:
            self.digests.clear()
            self.resets += 1
        assert self.digests.isdisjoint(message.added) and self.digests.issuperset(message.removed)
        self.digests |= set(message.added)
        self.digests -= set(message.removed)


def long_context(**changes: object) -> Limits:
    sizes = {"block_size": 4, "max_model_len": 512, "num_blocks": 200, "max_num_batched_tokens": 256}
    return limits(**(sizes | {"max_prefill_chunk": 256, "embeds_width": 2, "max_embedding_bytes": 2**20} | changes))


def test_a_scheduler_publishes_the_digests_of_a_prompt() -> None:
    rows = embeds(*range(1, 41))
    segment = EmbedsSegment(start=30, embeds=rows, digests=rows.row_digests())
    asked = [
        request("plain", PROMPT, 1),
        request("salted", PROMPT, 1, salt="tenant"),
        replace(request("adapted", PROMPT, 1), adapter=Adapter(name="a", number=3, path="/a")),
        request("mixed", MixedPrompt([*PROMPT[:30], *[0] * 20, *PROMPT[50:]], [segment]), 1),
        request("pooled", PROMPT[::-1], None, pooling=Pooling.LAST),
    ]
    digests = [prompt_digests(each, 4) for each in asked]
    assert [len(each) for each in digests] == [397 // tokens_per_digest(4)] * 5
    assert len(set().union(*digests)) == 5 * len(digests[0]) - 1, "plain and mixed share what is before the rows"
    for each, expected in zip(asked, digests, strict=True):
        simulation = Simulation(long_context())
        keys = simulation.scheduler.prefixes.publish()
        simulation.add(each)
        simulation.run()
        assert keys.take() == (list(expected), []), each.request_id


def test_an_answer_is_published_with_its_prompt() -> None:
    simulation = Simulation(long_context())
    keys = simulation.scheduler.prefixes.publish()
    simulation.add(request("turn", PROMPT[:100], 60))
    simulation.run()
    following = request("next", [*PROMPT[:100], *simulation.outputs["turn"]], 1)
    assert keys.take() == (list(prompt_digests(following, 4)), [])


def test_requests_that_use_no_cached_blocks_have_no_digests() -> None:
    assert prompt_digests(request("mean", PROMPT, None, pooling=Pooling.MEAN), 4) == ()
    assert prompt_digests(request("short", PROMPT[:16], 1), 4) == (), "the last token is always computed"
    assert len(prompt_digests(request("longer", PROMPT[:17], 1), 4)) == 1


def test_nothing_is_collected_unasked() -> None:
    simulation = Simulation(long_context())
    simulation.add(request("plain", PROMPT, 1))
    simulation.run()
    assert simulation.scheduler.pool.on_forget is None and simulation.scheduler.prefixes._published is None


@settings(max_examples=50 * EFFORT)
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_the_published_keys_are_those_of_the_cache(seed: int, most: int) -> None:
    """Whatever is cached, shared, evicted and forgotten: changes add up to keys that are cached, and to all of them
    while there are few."""
    rnd = random.Random(seed)
    pool, keys, told = BlockPool(10), PublishedKeys(most), set[bytes]()
    pool.on_forget = keys.remove
    for _ in range(60):
        match rnd.randrange(4):
            case 0 | 1 if pool.num_free:
                (block,) = pool.allocate(1)
                pool.remember(block, key := bytes([rnd.randrange(20)]))
                keys.use(key)
                pool.release([block])
            case 2:
                added, removed = keys.take()
                assert told.isdisjoint(added) and told.issuperset(removed)
                told = (told | set(added)) - set(removed)
                assert told <= set(pool.by_key) and len(told) <= most
                assert most < 9 or told == set(pool.by_key)
            case 3 if rnd.random() < 0.1:
                pool.forget_all()


def test_of_many_keys_those_used_last_are_told() -> None:
    """One prompt is asked again and again among others that are not: it stays, and so do the latest of these."""
    simulation = Simulation(long_context())
    keys = simulation.scheduler.prefixes.publish()
    keys._most = 60
    shared, told = set(prompt_digests(request("shared", PROMPT[:100], 1), 4)), set[bytes]()
    for number in range(20):
        for name, prompt in (("shared", PROMPT[:100]), ("other", [number % 29, *PROMPT[200:298]])):
            simulation.add(latest := request(f"{name}-{number}", prompt, 1))
            simulation.run()
        added, removed = keys.take()
        told = (told | set(added)) - set(removed)
        assert shared <= told and set(prompt_digests(latest, 4)) <= told and len(told) <= 60


def test_a_client_without_a_listener_asks_for_no_digests() -> None:
    async def scenario(client: EngineClient, launch: StandIns) -> bool:
        await client.start()
        await client.close()
        return launch.launched[0].started_with.publishes_digests

    plain, listening = StandIns(), StandIns()
    assert not asyncio.run(scenario(EngineClient(load(env={}), FILES, plain), plain))
    assert asyncio.run(scenario(EngineClient(load(env={}), FILES, listening, on_digests=Heard()), listening))


def test_a_real_engine_publishes_what_the_edge_computes(tiny_model: Path) -> None:
    async def scenario() -> None:
        heard = Heard()
        client = EngineClient(
            load({"kv_cache_memory_mb": 16, "threads": 1}, env={}), resolve(str(tiny_model)), on_digests=heard
        )
        await client.start()
        try:
            params = SamplingParams(max_tokens=1, seed=0)
            asked = Request(request_id="a", prompt_token_ids=PROMPT[:200], params=params, cache_salt="s")
            entry = client.submit(asked)
            await until(lambda: not entry.is_open)
            expected = set(prompt_digests(asked, client.model.block_size))
            assert len(expected) == 199 // tokens_per_digest(client.model.block_size) > 1
            await until(lambda: heard.digests == expected, "the digests of the prompt")
            await client.control(ResetPrefixCache())
            await until(lambda: not heard.digests, "that they are gone")

            entry = client.submit(replace(asked, request_id="b"))
            await until(lambda: not entry.is_open)
            await until(lambda: heard.digests == expected)
            resets = heard.resets
            assert client.engine_pid is not None
            os.kill(client.engine_pid, signal.SIGKILL)
            await until(lambda: heard.resets > resets, "that the cache died with its engine")
            assert not heard.digests
        finally:
            await client.close()

    asyncio.run(scenario())
