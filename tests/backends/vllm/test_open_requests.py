"""Between the api process and vLLM: what goes back, when, and for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from weft.backends.vllm import open_requests as desk_module
from weft.backends.vllm.open_requests import OpenRequests
from weft.backends.vllm.stats import VllmStats
from weft.engine.wire import FromEngine, Started, StepOutput
from weft.errors import EngineFault, InvalidRequest
from weft.types import Event, FinishReason, Request, SamplingParams, TokenLogprob


class Sent(OpenRequests):
    """Keeps what it would send."""

    def __init__(self, max_running: int = 2) -> None:
        super().__init__(None, VllmStats(), max_running)  # type: ignore[arg-type]
        self.sent: list[FromEngine] = []

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    @property
    def started(self) -> list[list[str]]:
        return [message.request_ids for message in self.sent if isinstance(message, Started)]

    @property
    def outputs(self) -> list[StepOutput]:
        return [message for message in self.sent if isinstance(message, StepOutput)]


def requests(*names: str) -> list[Request]:
    return [Request(request_id=name, prompt_token_ids=[1], params=SamplingParams()) for name in names]


def at_a_desk(scenario: Callable[[Sent], Awaitable[None]]) -> None:
    async def run() -> None:
        await scenario(Sent())

    asyncio.run(run())


def test_one_message_for_all_that_came_in_a_turn() -> None:
    async def scenario(desk: Sent) -> None:
        desk.accept(requests("a", "b"))
        desk.bring([Event(request_id="a", token_ids=[1])])
        desk.bring([Event(request_id="b", token_ids=[2], finish=FinishReason.LENGTH)])
        assert desk.outputs == []
        await asyncio.sleep(0)
        (output,) = desk.outputs
        assert output.tokens == {"a": 1} and [event.token_ids for event in output.events] == [[2]]
        desk.bring([Event(request_id="a", token_ids=[3])])
        await asyncio.sleep(0)
        assert len(desk.outputs) == 2

    at_a_desk(scenario)


def test_what_a_turn_brought_one_request_is_one_event_in_order() -> None:
    async def scenario(desk: Sent) -> None:
        desk.accept(requests("a", "b"))
        scores = [TokenLogprob(-float(i)) for i in range(3)]
        desk.bring([Event(request_id="a", token_ids=[1], logprobs=scores[:1], cached_tokens=4, queue_seconds=0.5)])
        desk.bring([Event(request_id="a", token_ids=[2], logprobs=scores[1:2])])
        desk.bring(
            [Event(request_id="a", token_ids=[3], logprobs=scores[2:], finish=FinishReason.STOP, stop_token_id=3)]
        )
        desk.bring([Event(request_id="b", token_ids=[5]), Event(request_id="b", token_ids=[6])])
        await asyncio.sleep(0)
        (output,) = desk.outputs
        assert output.tokens == {}
        assert output.events == [
            Event(
                request_id="a",
                token_ids=[1, 2, 3],
                logprobs=scores,
                cached_tokens=4,
                queue_seconds=0.5,
                finish=FinishReason.STOP,
                stop_token_id=3,
            ),
            Event(request_id="b", token_ids=[5, 6]),
        ]

    at_a_desk(scenario)


def test_the_oldest_are_taken_to_run() -> None:
    async def scenario(desk: Sent) -> None:
        desk.accept(requests("a", "b", "c"))
        assert desk.started == [["a", "b"]]
        desk.bring([Event(request_id="a", finish=FinishReason.LENGTH)])
        assert desk.started == [["a", "b"], ["c"]]
        desk.accept(requests("d"))
        desk.close(["b"])
        assert desk.started[-1] == ["d"]

    at_a_desk(scenario)


def test_what_comes_for_a_request_that_is_closed_is_dropped() -> None:
    async def scenario(desk: Sent) -> None:
        desk.accept(requests("a", "b"))
        desk.close(["a"])
        desk.bring([Event(request_id="a", token_ids=[1]), Event(request_id="b", token_ids=[2])])
        desk.bring([Event(request_id="b", finish=FinishReason.STOP)])
        desk.bring([Event(request_id="b", finish=FinishReason.STOP)])
        await asyncio.sleep(0)
        (output,) = desk.outputs
        assert output.tokens == {}
        assert output.events == [Event(request_id="b", token_ids=[2], finish=FinishReason.STOP)], "it ends once"
        assert output.stats.running == 0

    at_a_desk(scenario)


def test_whose_fault_it_was() -> None:
    async def scenario(desk: Sent) -> None:
        desk.accept(requests("a", "b"))
        desk.fail("a", InvalidRequest("no"))
        desk.fail("b", EngineFault("broken"))
        await asyncio.sleep(0)
        ends = {event.request_id: (event.finish, event.error) for event in desk.outputs[0].events}
        assert ends == {"a": (FinishReason.REJECTED, "no"), "b": (FinishReason.ERROR, "broken")}

    at_a_desk(scenario)


def test_silence_is_counted_only_while_something_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(desk_module, "time", SimpleNamespace(monotonic=lambda: now))

    async def scenario(desk: Sent) -> None:
        nonlocal now
        assert desk.silence_seconds == 0
        desk.accept(requests("a"))
        now += 5
        assert desk.silence_seconds == 5
        desk.bring([Event(request_id="a", token_ids=[1])])
        assert desk.silence_seconds == 0
        now += 3
        assert desk.silence_seconds == 3
        desk.close(["a"])
        assert desk.silence_seconds == 0

    at_a_desk(scenario)


def test_it_dies_once() -> None:
    async def scenario(desk: Sent) -> None:
        desk.died(ArithmeticError("first"))
        desk.died(ArithmeticError("second"))
        assert str(desk.death.result()) == "first"

    at_a_desk(scenario)


def figures_of(**stats: Any) -> VllmStats:
    figures = VllmStats()
    figures.logger(Named(cache_config=Named(num_gpu_blocks=200)), 0)
    figures.record(Named(**stats["scheduler"]), Named(**stats["iteration"]))
    return figures


class Named:
    def __init__(self, **fields: Any) -> None:
        self.__dict__ = fields


def test_figures_add_up_and_gauges_end_with_the_last_request() -> None:
    scheduler = {"num_running_reqs": 3, "kv_cache_usage": 0.5, "prefix_cache_stats": Named(queries=100, hits=40)}
    prompts = Named(total=100, computed=60)
    iteration = {"prompt_token_stats": prompts, "num_generation_tokens": 3, "num_preempted_reqs": 1}
    figures = figures_of(scheduler=scheduler, iteration=iteration)
    figures.record(None, Named(**iteration))
    stats = figures.stats(num_open=3)
    assert (stats.running, stats.blocks_total, stats.blocks_used) == (3, 200, 100)
    assert (stats.prompt_tokens, stats.computed_tokens, stats.generation_tokens) == (200, 126, 6)
    assert (stats.prefix_queries, stats.prefix_hits, stats.preemptions, stats.steps) == (100, 40, 2, 2)
    idle = figures.stats(num_open=0)
    assert (idle.running, idle.blocks_used, idle.prompt_tokens) == (0, 0, 200)
