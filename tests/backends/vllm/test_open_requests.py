"""Between the api process and vLLM: what goes back, when, and for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from weft.backends.vllm import open_requests as open_requests_module
from weft.backends.vllm.open_requests import OpenRequests
from weft.backends.vllm.stats import VllmStats
from weft.engine.wire import FromEngine, Started, StepOutput
from weft.errors import EngineFault, InvalidRequest
from weft.machine.hardware import MemoryGauge
from weft.types import Event, FinishReason, Request, SamplingParams, TokenLogprob


class Sent(OpenRequests):
    """Keeps what it would send."""

    def __init__(self, max_running: int = 2) -> None:
        super().__init__(None, VllmStats(MemoryGauge(lambda: (0, 0))), max_running)  # type: ignore[arg-type]
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


def with_open_requests(scenario: Callable[[Sent], Awaitable[None]]) -> None:
    async def run() -> None:
        await scenario(Sent())

    asyncio.run(run())


def test_one_message_for_all_that_came_in_a_turn() -> None:
    async def scenario(open_requests: Sent) -> None:
        open_requests.accept(requests("a", "b"))
        open_requests.bring([Event(request_id="a", token_ids=[1])])
        open_requests.bring([Event(request_id="b", token_ids=[2], finish=FinishReason.LENGTH)])
        assert open_requests.outputs == []
        await asyncio.sleep(0)
        (output,) = open_requests.outputs
        assert output.tokens == {"a": 1} and [event.token_ids for event in output.events] == [[2]]
        open_requests.bring([Event(request_id="a", token_ids=[3])])
        await asyncio.sleep(0)
        assert len(open_requests.outputs) == 2

    with_open_requests(scenario)


def test_what_a_turn_brought_one_request_is_one_event_in_order() -> None:
    async def scenario(open_requests: Sent) -> None:
        open_requests.accept(requests("a", "b"))
        scores = [TokenLogprob(-float(i)) for i in range(3)]
        open_requests.bring(
            [Event(request_id="a", token_ids=[1], logprobs=scores[:1], cached_tokens=4, queue_seconds=0.5)]
        )
        open_requests.bring([Event(request_id="a", token_ids=[2], logprobs=scores[1:2])])
        open_requests.bring(
            [Event(request_id="a", token_ids=[3], logprobs=scores[2:], finish=FinishReason.STOP, stop_token_id=3)]
        )
        open_requests.bring([Event(request_id="b", token_ids=[5]), Event(request_id="b", token_ids=[6])])
        await asyncio.sleep(0)
        (output,) = open_requests.outputs
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

    with_open_requests(scenario)


def test_the_oldest_are_taken_to_run() -> None:
    async def scenario(open_requests: Sent) -> None:
        open_requests.accept(requests("a", "b", "c"))
        assert open_requests.started == [["a", "b"]]
        open_requests.bring([Event(request_id="a", finish=FinishReason.LENGTH)])
        assert open_requests.started == [["a", "b"], ["c"]]
        open_requests.accept(requests("d"))
        open_requests.close(["b"])
        assert open_requests.started[-1] == ["d"]

    with_open_requests(scenario)


def test_what_comes_for_a_request_that_is_closed_is_dropped() -> None:
    async def scenario(open_requests: Sent) -> None:
        open_requests.accept(requests("a", "b"))
        open_requests.close(["a"])
        open_requests.bring([Event(request_id="a", token_ids=[1]), Event(request_id="b", token_ids=[2])])
        open_requests.bring([Event(request_id="b", finish=FinishReason.STOP)])
        open_requests.bring([Event(request_id="b", finish=FinishReason.STOP)])
        await asyncio.sleep(0)
        (output,) = open_requests.outputs
        assert output.tokens == {}
        assert output.events == [Event(request_id="b", token_ids=[2], finish=FinishReason.STOP)], "it ends once"
        assert output.stats.running == 0

    with_open_requests(scenario)


def test_whose_fault_it_was() -> None:
    async def scenario(open_requests: Sent) -> None:
        open_requests.accept(requests("a", "b"))
        open_requests.fail("a", InvalidRequest("no"))
        open_requests.fail("b", EngineFault("broken"))
        await asyncio.sleep(0)
        ends = {event.request_id: (event.finish, event.error) for event in open_requests.outputs[0].events}
        assert ends == {"a": (FinishReason.REJECTED, "no"), "b": (FinishReason.ERROR, "broken")}

    with_open_requests(scenario)


def test_silence_is_counted_only_while_something_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(open_requests_module, "time", SimpleNamespace(monotonic=lambda: now))

    async def scenario(open_requests: Sent) -> None:
        nonlocal now
        assert open_requests.silence_seconds == 0
        open_requests.accept(requests("a"))
        now += 5
        assert open_requests.silence_seconds == 5
        open_requests.bring([Event(request_id="a", token_ids=[1])])
        assert open_requests.silence_seconds == 0
        now += 3
        assert open_requests.silence_seconds == 3
        open_requests.close(["a"])
        assert open_requests.silence_seconds == 0

    with_open_requests(scenario)


def test_it_dies_once() -> None:
    async def scenario(open_requests: Sent) -> None:
        open_requests.died(ArithmeticError("first"))
        open_requests.died(ArithmeticError("second"))
        assert str(open_requests.death.result()) == "first"

    with_open_requests(scenario)


def test_only_events_that_tell_of_a_token_alone_are_sent_as_a_token() -> None:
    plain = Event(request_id="plain", token_ids=[7])
    others = [
        Event(request_id="first", token_ids=[7], cached_tokens=0),
        Event(request_id="last", token_ids=[7], finish=FinishReason.LENGTH),
        Event(request_id="scored", token_ids=[7], logprobs=[TokenLogprob(-1.0)]),
        Event(request_id="two", token_ids=[7, 8]),
        Event(request_id="none", finish=FinishReason.ERROR, error="broken"),
    ]

    async def scenario(open_requests: Sent) -> None:
        open_requests.accept(requests("plain", *(event.request_id for event in others)))
        open_requests.bring([others[0], plain, *others[1:]])
        await asyncio.sleep(0)
        (output,) = open_requests.outputs
        assert output.tokens == {"plain": 7} and output.events == others

    with_open_requests(scenario)


def stats_of(**stats: Any) -> VllmStats:
    vllm_stats = VllmStats(MemoryGauge(lambda: (0, 0)))
    vllm_stats.logger(Named(cache_config=Named(num_gpu_blocks=200)), 0)
    vllm_stats.record(Named(**stats["scheduler"]), Named(**stats["iteration"]))
    return vllm_stats


class Named:
    def __init__(self, **fields: Any) -> None:
        self.__dict__ = fields


def test_figures_add_up_and_gauges_end_with_the_last_request() -> None:
    scheduler = {"num_running_reqs": 3, "kv_cache_usage": 0.5, "prefix_cache_stats": Named(queries=100, hits=40)}
    prompts = Named(total=100, computed=60)
    iteration = {"prompt_token_stats": prompts, "num_generation_tokens": 3, "num_preempted_reqs": 1}
    vllm_stats = stats_of(scheduler=scheduler, iteration=iteration)
    vllm_stats.record(None, Named(**iteration))
    stats = vllm_stats.stats(num_open=3)
    assert (stats.running, stats.blocks_total, stats.blocks_used) == (3, 200, 100)
    assert (stats.prompt_tokens, stats.computed_tokens, stats.generation_tokens) == (200, 126, 6)
    assert (stats.prefix_queries, stats.prefix_hits, stats.preemptions, stats.steps) == (100, 40, 2, 2)
    idle = vllm_stats.stats(num_open=0)
    assert (idle.running, idle.blocks_used, idle.prompt_tokens) == (0, 0, 200)
