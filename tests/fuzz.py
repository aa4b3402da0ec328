"""Hostile requests over both protocols, many at once, beside a canary: python -m tests.fuzz --requests 100000 --seed 1

They are those of tests/e2e: wrong values alone and in pairs, fields that are too much, and bytes that were cut off or
changed on the way. A table tells how it went, and the exit code is 1 when anything in it must not be. `--only INDEX`
sends one request of the seed again, alone. `make fuzz` runs it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc.aio
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tests.e2e import hostile, hostile_rpc, oversized
from tests.e2e.canary import MAX_GAP_MS, TRIES, Canary, Memory, noticed
from tests.e2e.hostile import Asked, Json
from tests.e2e.hostile_clients import PRIVATE, Http, Rpc, check_answer, check_status
from tests.e2e.hostile_rpc import AskedRpc
from tests.e2e.tiny_server import GuardedServer
from tests.waiting import wait_until

AT_ONCE = 8
LARGE_BYTES = 1 << 20
"""Larger ones are sent one at a time: the memory that one takes can then be told."""
HEAD_SIZES = (100, 4000, 40_000)
LISTEN_S = 0.25
SHOWN = 10
MAX_GROWTH_MB = 256

T = TypeVar("T")


class Fuzz(Struct, frozen=True):
    """One request of a plan, made when it is sent."""

    kind: str
    make: Callable[[], Asked | AskedRpc]
    part: float = 1.0
    """Below 1: so much of it is sent, and then the client hangs up."""
    size: int = 0


def plan(openapi: Json, seed: int) -> Iterator[Fuzz]:
    """Requests without end, the same ones for the same seed. Every table is gone through before it begins again."""
    rng = random.Random(seed)
    tables = {kind: (weight, make(openapi, random.Random(f"{seed} {kind}"))) for kind, weight, make in KINDS}
    kinds, weights = [*tables], [weight for weight, _ in tables.values()]
    while True:
        (kind,) = rng.choices(kinds, weights)
        yield replace(next(tables[kind][1]), kind=kind)


def _again(table: Sequence[T], rng: random.Random) -> Iterator[T]:
    while True:
        yield from rng.sample(table, len(table))


def _as_it_is(asked: Asked | AskedRpc) -> Fuzz:
    return Fuzz("", lambda: asked)


def _alone(openapi: Json, rng: random.Random) -> Iterator[Fuzz]:
    table = [*hostile.alone(hostile.parameters_of(openapi)), *hostile.unreadable(), *hostile.for_operators()]
    return map(_as_it_is, _again(table, rng))


def _pairs(openapi: Json, rng: random.Random) -> Iterator[Fuzz]:
    parameters = hostile.parameters_of(openapi)
    while True:
        yield from map(_as_it_is, rng.sample(pairs := [*hostile.in_pairs(parameters, rng)], len(pairs)))


def _small(rng: random.Random) -> int:
    return int(1024 * 100 ** rng.random())


def _too_much(size: Callable[[random.Random], int], openapi: Json, rng: random.Random) -> Iterator[Fuzz]:
    for one in _again(oversized.corpus(openapi, (0,)), rng):
        sized = replace(one, size=size(rng))
        yield Fuzz("", sized.asked, size=sized.size)


def _corrupted(openapi: Json, rng: random.Random) -> Iterator[Fuzz]:
    for one in _pairs(openapi, rng):
        asked = one.make()
        assert isinstance(asked, Asked)
        yield _as_it_is(hostile.corrupted(asked, rng))


def _torn(openapi: Json, rng: random.Random) -> Iterator[Fuzz]:
    for one in _too_much(_small, openapi, rng):
        yield replace(one, part=rng.random())


def _compressed(openapi: Json, rng: random.Random) -> Iterator[Fuzz]:
    for one in _pairs(openapi, rng):
        asked = one.make()
        assert isinstance(asked, Asked)
        whole = hostile.compressed(asked, rng.choice([*hostile.ENCODERS]))
        yield _as_it_is(whole if rng.random() < 0.5 else hostile.corrupted(whole, rng))


def _bombs(openapi: Json, rng: random.Random) -> Iterator[Fuzz]:
    for one in _too_much(lambda rng: rng.choice((2, 31, 100)) << 20, openapi, rng):
        yield replace(one, make=partial(_bomb, one.make, rng.choice([*hostile.ENCODERS])))


def _bomb(make: Callable[[], Asked | AskedRpc], encoding: str) -> Asked:
    asked = make()
    assert isinstance(asked, Asked)
    return hostile.compressed(asked, encoding)


def _heads(openapi: Json, rng: random.Random) -> Iterator[Fuzz]:
    return map(_as_it_is, _again([*oversized.heads(HEAD_SIZES)], rng))


def _rpc_alone(openapi: Json, rng: random.Random) -> Iterator[Fuzz]:
    return map(_as_it_is, _again([*hostile_rpc.alone(), *oversized.rpc_heads(HEAD_SIZES)], rng))


def _rpc_pairs(openapi: Json, rng: random.Random) -> Iterator[Fuzz]:
    while True:
        yield from map(_as_it_is, rng.sample(pairs := [*hostile_rpc.in_pairs(rng)], len(pairs)))


def _rpc_too_much(size: Callable[[random.Random], int], openapi: Json, rng: random.Random) -> Iterator[Fuzz]:
    for one in _again(oversized.rpc_corpus((0,)), rng):
        sized = replace(one, size=size(rng))
        yield Fuzz("", sized.asked, size=sized.size)


def _rpc_broken(openapi: Json, rng: random.Random) -> Iterator[Fuzz]:
    while True:
        yield _as_it_is(hostile_rpc.broken(rng, rng.choice([*hostile_rpc.BASES])))


def _fixed(size: int) -> Callable[[random.Random], int]:
    return lambda rng: size


KINDS: tuple[tuple[str, float, Callable[[Json, random.Random], Iterator[Fuzz]]], ...] = (
    ("alone", 14, _alone),
    ("pairs", 22, _pairs),
    ("too much", 16, partial(_too_much, _small)),
    ("corrupted", 8, _corrupted),
    ("compressed", 4, _compressed),
    ("bombs", 0.1, _bombs),
    ("torn", 3, _torn),
    ("heads", 6, _heads),
    ("2 MB", 0.8, partial(_too_much, _fixed(2 << 20))),
    ("31 MB", 0.08, partial(_too_much, _fixed(31 << 20))),
    ("rpc alone", 6, _rpc_alone),
    ("rpc pairs", 12, _rpc_pairs),
    ("rpc too much", 8, partial(_rpc_too_much, _small)),
    ("rpc broken", 4, _rpc_broken),
    ("rpc 2 MB", 0.5, partial(_rpc_too_much, _fixed(2 << 20))),
    ("rpc 3.9 MB", 0.3, partial(_rpc_too_much, _fixed(3_900_000))),
)
"""Each with its share of the requests, in percent."""


class Ended(Struct, frozen=True):
    index: int
    kind: str
    seconds: float


class Gap(Struct, frozen=True):
    ms: float
    requests: dict[int, str]
    """The kinds of those that were in flight, by their indexes."""


class Findings:
    """Everything that the table tells."""

    def __init__(self) -> None:
        self.statuses: Counter[tuple[str, str]] = Counter()
        self.slowest: list[Ended] = []
        self.gaps: list[Gap] = []
        self.growth_mb = 0.0
        self.failures: list[str] = []
        """What must not be."""
        self.num_leaks = 0
        self.in_flight: dict[int, str] = {}
        self._ended_since: dict[int, str] = {}

    def end(self, ended: Ended) -> None:
        self._ended_since[ended.index] = self.in_flight.pop(ended.index)
        self.slowest = sorted([*self.slowest, ended], key=lambda one: -one.seconds)[:SHOWN]

    def hear(self, gap_ms: float) -> None:
        gap = Gap(gap_ms, self._ended_since | self.in_flight)
        self._ended_since = {}
        self.gaps = sorted([*self.gaps, gap], key=lambda one: -one.ms)[:SHOWN]

    @property
    def num_5xx(self) -> int:
        """But for 503, which tells of an overload."""
        return sum(count for (_, status), count in self.statuses.items() if status[0] == "5" and status != "503")


class Fuzzer:
    """The clients of the tenant that sends the plan's requests, and what they find."""

    def __init__(self, server: GuardedServer, canary: Canary, channel: grpc.aio.Channel) -> None:
        self.found = Findings()
        self.canary = canary
        self.memory = Memory(server.process.pid)
        self._http = Http(server.url, "bad")
        self._rpc = Rpc(channel, "bad")
        self._large = asyncio.Lock()
        self._stored = ""

    async def keep_a_response(self) -> None:
        body = json.dumps(hostile.BASES["/v1/responses"]).encode()
        status, answer = await self._http.send(Asked("/v1/responses", body))
        assert status == 200, answer
        self._stored = json.loads(answer)["id"]

    async def send(self, one: Fuzz) -> str:
        """Send a request, and return what came back. Raises AssertionError for what must not come."""
        asked = one.make()
        if isinstance(asked, AskedRpc):
            code, told = await self._rpc.ask(asked)
            self._count(asked.method, code.name, told if code.value[0] else "")
            check_status(asked, code, told)
            return f"{code.name} {told}"
        asked = replace(asked, path=asked.path.replace(oversized.STORED, self._stored))
        endpoint = f"{asked.method} {_endpoint(asked.path)}"
        if one.part < 1:
            await self._http.tear(asked, one.part)
            self._count(endpoint, "hung up")
            return "hung up"
        status, told = await self._http.send(asked)
        self._count(endpoint, str(status), told if status != 200 else "")
        check_answer(asked, status, told)
        return f"{status} {told}"

    def _count(self, endpoint: str, status: str, error: str = "") -> None:
        self.found.statuses[endpoint, status] += 1
        self.found.num_leaks += PRIVATE.search(error) is not None

    async def send_all(self, requests: Iterator[tuple[int, Fuzz]], advance: Callable[[], None]) -> None:
        async def some() -> None:
            for index, one in requests:
                await self._send_one(index, one)
                advance()

        listening = asyncio.create_task(self._listen())
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(some())
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)

    async def _send_one(self, index: int, one: Fuzz) -> None:
        async with self._large if one.size >= LARGE_BYTES else contextlib.nullcontext():
            began = time.perf_counter()
            self.found.in_flight[index] = one.kind
            try:
                await self.send(one)
            except Exception as error:
                self.found.failures.append(f"request {index} ({one.kind}): {_short(str(error) or repr(error))}")
            self.found.end(Ended(index, one.kind, time.perf_counter() - began))

    async def _listen(self) -> None:
        never = asyncio.Event()
        while True:
            before = self.memory.now()
            self.memory.reset_peak()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LISTEN_S):
                    await never.wait()
            try:
                heard = await asyncio.to_thread(self.canary.listen)
            except AssertionError as error:
                self.found.failures.append(f"the canary: {error}")
                return
            self.found.hear(heard.gap_ms)
            self.found.growth_mb = max(self.found.growth_mb, self.memory.peak() - before)

    async def send_alone(self, index: int, one: Fuzz) -> None:
        """Send a request that was in flight during a gap again, alone: was it the one, or was the machine busy?"""
        try:
            seen = await noticed(partial(self.send, one), self.canary, self.memory)
        except AssertionError as error:
            self.found.failures.append(f"request {index} ({one.kind}), alone: {_short(str(error))}")
            return
        if not seen.is_short:
            self.found.failures.append(
                f"request {index} ({one.kind}): the server computed for {seen.computed_ms:.0f} ms between two pieces "
                f"of the canary, {TRIES} times"
            )
        if seen.growth_mb > MAX_GROWTH_MB:
            self.found.failures.append(f"request {index} ({one.kind}): {seen.growth_mb:.0f} MB more")


def _endpoint(path: str) -> str:
    """The route, as far as it can be told from a path."""
    bare = path.partition("?")[0]
    known = {*hostile.BASES, *hostile.OPERATORS, "/v1/models", "/metrics", "/health"}
    for prefix in ("/v1/responses/", "/v1/models/"):
        if bare.startswith(prefix):
            return prefix + "…"
    return bare if bare in known or bare.startswith("/admin/") else "…"


def _short(text: str, length: int = 700) -> str:
    return text if len(text) <= length else text[:length] + "…"


def _stalls(server: GuardedServer) -> str:
    return ", ".join(f"{count} over {1000 * bound:.0f} ms" for bound, count in server.stalls().items())


def report(found: Findings, server: GuardedServer, suspects: dict[int, Fuzz], console: Console) -> None:
    statuses = sorted({status for _, status in found.statuses})
    table = Table("endpoint", *statuses, title="Requests")
    for endpoint in sorted({endpoint for endpoint, _ in found.statuses}):
        table.add_row(endpoint, *(str(found.statuses[endpoint, status] or "") for status in statuses))
    table.add_row("all", *(str(sum(n for (_, s), n in found.statuses.items() if s == status)) for status in statuses))
    console.print(table)
    table = Table("index", "kind", "seconds", "request", title="Slowest")
    for ended in found.slowest:
        told = _short(str(suspects[ended.index].make()), 160)
        table.add_row(str(ended.index), ended.kind, f"{ended.seconds:.2f}", told)
    console.print(table)
    table = Table("ms", "in flight", title="Longest gaps of the canary")
    for gap in found.gaps:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(gap.requests.values()).most_common())
        table.add_row(f"{gap.ms:.0f}", f"{_short(str([*gap.requests]), 100)} ({kinds})")
    console.print(table)
    for line in [line for line in server.log if "stood still" in line][-SHOWN:]:
        console.print(_short(line.strip(), 300), markup=False)
    for failure in found.failures[: 5 * SHOWN]:
        console.print(f"FAILED {failure}", markup=False)


def summary(fuzzer: Fuzzer, server: GuardedServer, began_mb: float, num_songs: int) -> tuple[Table, bool]:
    """The figures that must be right, and whether they are."""
    found = fuzzer.found
    musts = {
        "engine restarts": int(server.metric("weft_engine_restarts_total")),
        "5xx but 503": found.num_5xx,
        "answers that leak": found.num_leaks,
        "errors in the log": len(server.errors()),
        "anything else that must not be": len(found.failures),
    }
    table = Table("what", "figure", "must be", title="Summary")
    table.add_row("requests", str(sum(found.statuses.values())), "")
    table.add_row("songs of the canary, all the same", str(num_songs), "")
    table.add_row("longest gap of the canary", f"{found.gaps[0].ms:.0f} ms" if found.gaps else "", "")
    table.add_row("most memory within a quarter of a second", f"{found.growth_mb:.0f} MB", "")
    table.add_row("memory of the api process", f"{began_mb:.0f} MB, then {fuzzer.memory.now():.0f} MB", "")
    table.add_row("stalls of the event loop", _stalls(server), "")
    for what, count in musts.items():
        table.add_row(what, str(count), "0")
    return table, not any(musts.values())


async def fuzz(server: GuardedServer, num_requests: int, seed: int, only: int | None, console: Console) -> bool:
    openapi = server.get("/openapi.json").json()
    address = f"127.0.0.1:{server.grpc_port()}"
    with Canary(server.url, "good", server.process.pid) as canary:
        async with grpc.aio.insecure_channel(address) as channel:
            fuzzer = Fuzzer(server, canary, channel)
            await fuzzer.keep_a_response()
            began_mb = fuzzer.memory.now()
            if only is not None:
                return await _send_only(fuzzer, next(itertools.islice(plan(openapi, seed), only, None)), console)
            with Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            ) as progress:
                bar = progress.add_task("requests", total=num_requests)
                requests = itertools.islice(plan(openapi, seed), num_requests)
                await fuzzer.send_all(enumerate(requests), lambda: progress.advance(bar))
                suspects = _suspects(fuzzer.found, openapi, seed)
                bar = progress.add_task("again, alone", total=len(suspects))
                for index, one in suspects.items():
                    await fuzzer.send_alone(index, one)
                    progress.advance(bar)
            num_songs = canary.listen().songs
        report(fuzzer.found, server, suspects, console)
    wait_until(lambda: not server.metric("weft_num_requests_running"), "that the server is idle")
    table, is_good = summary(fuzzer, server, began_mb, num_songs)
    console.print(table)
    return is_good and server.engine_pid() == server.first_engine


def _suspects(found: Findings, openapi: Json, seed: int) -> dict[int, Fuzz]:
    """The slowest requests, and those in flight during the longest gaps, by their indexes."""
    indexes = {ended.index for ended in found.slowest}
    for gap in found.gaps:
        if gap.ms > MAX_GAP_MS:
            indexes.update(gap.requests)
    requests = itertools.islice(enumerate(plan(openapi, seed)), max(indexes, default=-1) + 1)
    return {index: one for index, one in requests if index in indexes}


async def _send_only(fuzzer: Fuzzer, one: Fuzz, console: Console) -> bool:
    console.print(f"{one.kind}: {_short(str(one.make()), 2000)}", markup=False)
    answers: list[str] = []

    async def send() -> None:
        answers.append(await fuzzer.send(one))

    seen = await noticed(send, fuzzer.canary, fuzzer.memory)
    console.print(_short(answers[-1], 2000), markup=False)
    console.print(
        f"{len(answers)} times: {seen.computed_ms:.0f} ms between the canary's pieces, {seen.growth_mb:.0f} MB more"
    )
    return seen.is_short and seen.growth_mb <= MAX_GROWTH_MB


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="INDEX", help="send this request of the seed alone")
    options = parser.parse_args()

    from tests.tiny_images import save_image_model
    from tests.tiny_models import save_directory

    console = Console(width=160 if not sys.stdout.isatty() else None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_directory("smollm2", folder / "tiny")
        image_model = save_image_model(folder / "tiny-dit", 96)
        flags = ("--max-model-len", "512", "--kv-cache-memory-mb", "16")
        with GuardedServer(model, image_model, folder / "keys", *flags) as server:
            is_good = asyncio.run(fuzz(server, options.requests, options.seed, options.only, console))
    raise SystemExit(0 if is_good else 1)


if __name__ == "__main__":
    main()
