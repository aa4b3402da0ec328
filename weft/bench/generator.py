"""The load generator: it sends the requests of a load when they are due, and reduces how they went to figures."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count, takewhile
from typing import Protocol

from msgspec import Struct

from weft.bench.arrivals import Load
from weft.bench.datasets import Dialogue
from weft.bench.http_load import MeasuredAnswer
from weft.errors import ConfigError

try:
    from uvloop import run as run
except ImportError:  # not on Windows
    from asyncio import run as run  # type: ignore[assignment]

MAX_REASONS = 20
"""Reasons of failures that a report keeps, the most frequent ones."""


class Client(Protocol):
    """Sends dialogues to a server, by whatever protocol it speaks."""

    async def converse(self, conversation: Dialogue, leave_after: int = 0) -> list[MeasuredAnswer]: ...

    async def close(self) -> None: ...


class Distribution(Struct, frozen=True, kw_only=True):
    """Times in milliseconds."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    curve: list[float] = []
    """The quantiles 0, 2, 4, … 100 %, for a plot."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Distribution:
        if not seconds:
            return cls()
        ordered = sorted(1000 * each for each in seconds)

        def quantile(share: float) -> float:
            """The nearest rank, so that every figure is one that was measured."""
            return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

        return cls(
            mean=statistics.fmean(ordered),
            p50=quantile(0.5),
            p90=quantile(0.9),
            p99=quantile(0.99),
            max=ordered[-1],
            curve=[quantile(percent / 100) for percent in range(0, 101, 2)],
        )


class Slo(Struct, frozen=True, kw_only=True):
    """A request must keep these bounds to count as good. They are in milliseconds; 0: no bound."""

    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    """The mean between the events of its stream."""
    e2e_ms: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parse `ttft:200,itl:50,e2e:5000`."""
        bounds: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.strip().partition(":")
            try:
                bounds[f"{name}_ms"] = float(value)
            except ValueError:
                bounds.clear()
                break
        if (text and not bounds) or bounds.keys() - set(cls.__struct_fields__):
            raise ConfigError(f"{text!r} is not an SLO.", hint="Write ttft:200,itl:50,e2e:5000, in milliseconds.")
        return cls(**bounds)

    def is_kept(self, answer: MeasuredAnswer) -> bool:
        if not answer.is_whole:
            return False
        first_ms = 1000 * (answer.seconds if answer.first_s is None else answer.first_s)
        between_ms = 1000 * statistics.fmean(answer.gaps_s) if answer.gaps_s else 0.0
        measured = ((self.ttft_ms, first_ms), (self.itl_ms, between_ms), (self.e2e_ms, 1000 * answer.seconds))
        return all(not bound or value <= bound for bound, value in measured)


ANY = Slo()


class Moment(Struct, frozen=True, kw_only=True):
    """One second of a run."""

    open_requests: int
    events: int


class Run(Struct, frozen=True, kw_only=True):
    """The figures of one run of a load."""

    seconds: float
    requests: int
    succeeded: int
    cancelled: int
    errors: dict[str, int]
    """The number of failures of each class."""
    failures: list[str]
    """Their reasons, the most frequent first."""
    prompt_tokens: int
    output_tokens: int
    messages: int
    """Events of streams, or messages of gRPC."""
    received_bytes: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    """Requests a second that kept the SLO; without one, all that succeeded."""
    first_token_ms: Distribution
    inter_token_ms: Distribution
    """Milliseconds between the events of a stream; a server may put several tokens in an event."""
    e2e_ms: Distribution
    late_ms: Distribution
    """Requests of an open loop were sent so much later than planned."""
    client_cpu_share: float
    """CPU seconds of the client over seconds: near 1, the client was the limit and not the server."""
    timeline: list[Moment]
    server_cpu_us_per_token: float | None = None
    """CPU time of the process that answers HTTP, by its own /metrics, over the tokens; None: it does not tell."""


class Cancellations(Struct, frozen=True):
    """A share of the requests, whose clients leave after a few events."""

    share: float = 0.0
    most_events: int = 16

    def draw(self, chance: random.Random) -> int:
        """Return after how many events a client leaves; 0: it stays."""
        return chance.randint(1, self.most_events) if chance.random() < self.share else 0


NONE_LEAVE = Cancellations()

Send = Callable[..., Awaitable[None]]
"""Sends a request by its number, and by the second at which it was to be sent."""


class Generator:
    """Runs loads against one server."""

    def __init__(
        self,
        client: Client,
        source: Iterator[Dialogue],
        chance: random.Random,
        *,
        slo: Slo = ANY,
        cancellations: Cancellations = NONE_LEAVE,
    ) -> None:
        self._client = client
        self._source = source
        self._chance = chance
        self._slo = slo
        self._cancellations = cancellations

    async def run(self, load: Load, tick: Callable[[], None] = lambda: None) -> Run:
        """Send every request of the load, wait until the last is answered, and return the figures."""
        # All are drawn before the first is sent: the generator must not be late because it makes up a prompt.
        work = [self._drawn() for _ in range(load.requests)]
        times = list(load.times(self._chance)) if load.rate else []
        answers: list[MeasuredAnswer] = []
        began, cpu_began = time.perf_counter(), time.process_time()

        async def send(number: int, planned_s: float | None = None) -> None:
            conversation, leave_after = work[number] if work else self._drawn()
            at = time.perf_counter() - began
            turns = await self._client.converse(conversation, leave_after)
            if planned_s is not None:
                turns[0].late_s = max(0.0, at - planned_s)
            for answer in turns:
                answer.began_s, at = at, at + answer.seconds
            answers.extend(turns)
            tick()

        if load.rate:
            await self._open_loop(load, times, began, send)
        else:
            await self._closed_loop(load, send)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        return figures(answers, seconds, cpu_seconds / seconds, self._slo)

    def _drawn(self) -> tuple[Dialogue, int]:
        return next(self._source), self._cancellations.draw(self._chance)

    async def _closed_loop(self, load: Load, send: Send) -> None:
        end = time.perf_counter() + load.seconds
        todo = (
            iter(range(load.requests)) if not load.seconds else takewhile(lambda _: time.perf_counter() < end, count())
        )

        async def ask_until_done() -> None:
            for number in todo:
                await send(number)

        await asyncio.gather(
            *(ask_until_done() for _ in range(min(load.connections, load.requests or load.connections)))
        )

    async def _open_loop(self, load: Load, times: list[float], began: float, send: Send) -> None:
        capacity = asyncio.Semaphore(load.connections or load.requests)

        async def send_in_turn(number: int, planned_s: float) -> None:
            async with capacity:
                await send(number, planned_s)

        async with asyncio.TaskGroup() as group:
            for number, planned_s in enumerate(times):
                await asyncio.sleep(max(0.0, began + planned_s - time.perf_counter()))
                group.create_task(send_in_turn(number, planned_s))


def figures(answers: list[MeasuredAnswer], seconds: float, client_cpu_share: float, slo: Slo) -> Run:
    whole = [answer for answer in answers if answer.is_whole]
    failed = [answer for answer in answers if answer.error]
    prompt_tokens = sum(answer.prompt_tokens for answer in whole)
    output_tokens = sum(answer.output_tokens for answer in answers)
    return Run(
        seconds=seconds,
        requests=len(answers),
        succeeded=len(whole),
        cancelled=sum(answer.was_cancelled for answer in answers),
        errors=dict(Counter(answer.error for answer in failed).most_common()),
        failures=[reason for reason, _ in Counter(answer.reason for answer in failed).most_common(MAX_REASONS)],
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        messages=sum(answer.num_messages for answer in answers),
        received_bytes=sum(answer.num_bytes for answer in answers),
        output_tokens_per_s=output_tokens / seconds,
        total_tokens_per_s=(prompt_tokens + output_tokens) / seconds,
        requests_per_s=len(whole) / seconds,
        goodput_per_s=sum(slo.is_kept(answer) for answer in answers) / seconds,
        first_token_ms=Distribution.of([answer.first_s for answer in whole if answer.first_s is not None]),
        inter_token_ms=Distribution.of([gap for answer in whole for gap in answer.gaps_s]),
        e2e_ms=Distribution.of([answer.seconds for answer in whole]),
        late_ms=Distribution.of([answer.late_s for answer in answers]),
        client_cpu_share=client_cpu_share,
        timeline=timeline(answers, seconds),
    )


def timeline(answers: Sequence[MeasuredAnswer], seconds: float) -> list[Moment]:
    """Return, for every second, how many requests were open in it and how many events came."""
    num_open, events = [0] * (int(seconds) + 1), [0] * (int(seconds) + 1)
    last = len(num_open) - 1
    for answer in answers:
        for second in range(int(answer.began_s), min(last, int(answer.began_s + answer.seconds)) + 1):
            num_open[second] += 1
        if answer.first_s is None:
            continue
        at = answer.began_s + answer.first_s
        for gap in (0.0, *answer.gaps_s):
            at += gap
            events[min(last, int(at))] += 1
    return [Moment(open_requests=count, events=came) for count, came in zip(num_open, events, strict=True)]
