"""A discrete-event simulation of a cluster: which share of prompts is found cached, and how long requests wait, under
the router of Weft and under rules that others use.

A replica computes one prompt after the other, of the tenant next for which it has computed least, each less the blocks
that its cache of the least recently used blocks holds, and decodes up to MAX_RUNNING requests beside it. Its speeds are
those measured for the 7B shape on one H200 (docs/benchmarks.md): prompts at 51,200 tok/s and 3.7 ms, decode steps of
3.6 ms and 0.03 ms a request; a step that decodes carries CHUNK tokens of a prompt. The edge hears of loads and digests
every 250 ms, as engines publish them.
"""

from __future__ import annotations

import gc
import heapq
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from msgspec import Struct

from weft.bench.progress_line import Advance
from weft.cluster.router import ReplicaLoad, Router, RouteRequest

BLOCK = 64
"""Tokens of a block: what one published digest stands for."""
CACHE_BLOCKS = 3072
"""196,608 tokens: about 92 GB of KV cache for the 7B shape in bfloat16."""
MAX_RUNNING = 256
PREFILL_TOKENS_PER_S = 51_200.0
PREFILL_SECONDS = 0.0037
STEP_SECONDS = 0.0036
STEP_SECONDS_PER_REQUEST = 0.00003
CHUNK = 512
REPORT_SECONDS = 0.25
IMAGE_TOKENS = 12_288
"""An image counts as so many tokens of prefill: 15 guided steps of 400 latent tokens."""
IMAGE_SLOTS = 4
BURST_SECONDS, BURST_RATIO = 2.0, 3.0
"""Bursty arrivals: every so often a quarter of the time has so many times the rate of the rest."""
NUM_DOCUMENTS = 20_000
NUM_TENANTS = 10
FLOOD_SHARE = 0.8
FLOOD = "flood"
"""The tenant, and the workload, that sends so much of all requests; figures are of the other tenants, who chat."""
MIXTURE = {"chat": 50, "rag": 30, "unrelated": 15, "image": 5}
WORKLOADS = ("chat", "rag", "unrelated", "mixed", FLOOD)
ARRIVALS = ("poisson", "bursty")
POLICIES = ("round robin", "power of two", "cache-aware tree", "weft")


class RouterWork(Struct, frozen=True, kw_only=True):
    workload: str = "mixed"
    arrivals: str = "poisson"
    """poisson or bursty."""
    load: float = 0.9
    """The rate of arrivals, over the rate that power of two choices can serve."""
    edges: int = 1
    """Each request comes to one of so many edges, which know their own requests only."""
    replicas: int = 1000
    requests: int = 1_000_000
    seed: int = 0


class PolicyFigures(Struct, frozen=True, kw_only=True):
    policy: str
    hit_rate: float
    """Prompt tokens found cached, over all prompt tokens."""
    queue_p50_ms: float
    queue_p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    imbalance: float
    """The busiest replica's seconds of prefill over the mean."""
    decision_p50_us: float
    """CPU time that a choice took, and to count the request as sent."""
    decision_mean_us: float
    decision_p99_us: float
    simulated_s: float


class RouterReport(Struct, frozen=True, kw_only=True):
    work: RouterWork
    requests_per_s: float
    figures: list[PolicyFigures]


class RouterReports(Struct, frozen=True, kw_only=True):
    reports: list[RouterReport]


class _Asked:
    """One request of the simulation."""

    __slots__ = ("arrived", "blocks", "cached", "chat", "output", "policy", "replica", "route", "tokens")

    def __init__(
        self, blocks: list[bytes], tokens: int, output: int, chat: _Chat | None = None, tenant: str = "",
        *, is_image: bool = False,
    ) -> None:  # fmt: skip
        self.blocks = blocks
        self.tokens = tokens
        self.output = output
        self.chat = chat
        session = "" if chat is None else chat.name
        self.route = RouteRequest(blocks, tokens, session=session, tenant=tenant, is_image=is_image)
        self.arrived = 0.0
        self.cached = 0
        self.policy: _Policy
        """The policy of its edge."""
        self.replica = -1


class _Chat:
    __slots__ = ("blocks", "name", "tenant")

    def __init__(self, name: str, blocks: list[bytes], tenant: str) -> None:
        self.name = name
        self.blocks = blocks
        self.tenant = tenant


class _Workload:
    """The requests, one after the other. Chats go on with what was answered, after others have come between."""

    def __init__(self, kind: str, seed: int) -> None:
        self._kind = kind
        self._rnd = random.Random(seed)
        self._num_blocks = 0
        self._num_chats = 0
        self._systems = [self.fresh(self._rnd.randrange(4, 33)) for _ in range(500)]
        self._documents: dict[int, list[bytes]] = {}
        self._instructions = self.fresh(8)
        self._idle: list[_Chat] = []
        self._kinds = [kind for kind, share in MIXTURE.items() for _ in range(share)]

    def fresh(self, count: int) -> list[bytes]:
        first, self._num_blocks = self._num_blocks, self._num_blocks + count
        return [number.to_bytes(8, "little") for number in range(first, first + count)]

    def next(self) -> _Asked:
        kind = self._kind
        if kind == "mixed":
            kind = self._kinds[int(self._rnd.random() * len(self._kinds))]
        elif kind == FLOOD and self._rnd.random() >= FLOOD_SHARE:
            kind = "chat"
        match kind:
            case "chat":
                return self._turn()
            case "rag":
                rank = self._zipf(NUM_DOCUMENTS)
                if rank not in self._documents:
                    self._documents[rank] = self.fresh(self._rnd.randrange(16, 129))
                document = self._documents[rank]
                return self._asked([*self._instructions, *document, *self.fresh(1)], 128)
            case "image":
                return _Asked([], IMAGE_TOKENS, 0, is_image=True)
            case "flood":
                blocks = [*self._instructions, *self.fresh(self._rnd.randrange(4, 65))]
                return self._asked(blocks, 256, tenant=FLOOD)
            case _:
                return self._asked(self.fresh(self._rnd.randrange(4, 65)), 256)

    def answered(self, asked: _Asked) -> list[bytes]:
        """Take in that a request was answered, and return the blocks of its prompt and answer."""
        chat, blocks = asked.chat, [*asked.blocks, *self.fresh(asked.output // BLOCK)]
        if chat is not None and len(blocks) < 128:
            chat.blocks = blocks
            self._idle.append(chat)
        return blocks

    def _turn(self) -> _Asked:
        """Return the next turn of a chat that waits for its user, or the first of a new one."""
        idle = self._idle
        if idle and self._rnd.random() < 0.75:
            at = int(self._rnd.random() * len(idle))
            idle[at], idle[-1] = idle[-1], idle[at]
            chat = idle.pop()
        else:
            self._num_chats += 1
            tenant = f"t{self._num_chats % NUM_TENANTS}" if self._kind == FLOOD else ""
            chat = _Chat(str(self._num_chats), self._systems[self._zipf(len(self._systems))], tenant)
        blocks = [*chat.blocks, *self.fresh(self._rnd.randrange(1, 5))]
        return self._asked(blocks, self._rnd.randrange(64, 513), chat, chat.tenant)

    def _asked(self, blocks: list[bytes], output: int, chat: _Chat | None = None, tenant: str = "") -> _Asked:
        # The last token is always computed, so a prompt has a little more than its full blocks.
        return _Asked(blocks, BLOCK * len(blocks) + 16, output, chat, tenant)

    def _zipf(self, count: int) -> int:
        """Return a rank below `count`: a rank is drawn about in proportion to its inverse."""
        return min(count - 1, int(count ** self._rnd.random()) - 1)


class _SimulatedReplica:
    """A replica: a queue of prompts for each tenant, decodes beside them, and a cache."""

    def __init__(self, number: int, *, publishes: bool) -> None:
        self.number = number
        self.name = f"r{number}"
        self._publishes = publishes
        self._queues: dict[str, deque[_Asked]] = {}
        """Only those that are not empty."""
        self._served: dict[str, int] = {}
        """Tokens that were computed, by tenant."""
        self.waiting = 0
        self.waiting_tokens = 0
        self.running = 0
        self.images = 0
        self.running_blocks = 0
        self.is_busy = False
        self.busy_seconds = 0.0
        self.cache: OrderedDict[bytes, None] = OrderedDict()
        self.added: dict[bytes, None] = {}
        self.removed: dict[bytes, None] = {}
        self.changed = True
        """True when its load is not what it last reported."""

    def queue(self, asked: _Asked) -> None:
        tenant = asked.route.tenant
        if tenant not in self._queues:
            # A tenant that had nothing waiting has no share saved up.
            least = min((self._served[name] for name in self._queues), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), least)
            self._queues[tenant] = deque()
        self._queues[tenant].append(asked)
        self.waiting += 1
        self.waiting_tokens += asked.tokens

    def next(self) -> _Asked:
        """Return the prompt that is to be computed next, of those that wait."""
        queues = self._queues
        tenant = next(iter(queues)) if len(queues) == 1 else min(queues, key=self._served.__getitem__)
        return queues[tenant][0]

    def begin(self, asked: _Asked) -> None:
        """Take the next prompt from the queue."""
        tenant = asked.route.tenant
        queue = self._queues[tenant]
        queue.popleft()
        if not queue:
            del self._queues[tenant]
        self._served[tenant] += asked.tokens - asked.cached + asked.output
        self.waiting -= 1
        self.waiting_tokens -= asked.tokens
        self.running += 1
        self.is_busy = True

    def find(self, asked: _Asked) -> int:
        """Return how many blocks of a prompt are cached, from the first on."""
        cache, found = self.cache, 0
        for block in asked.blocks:
            if block not in cache:
                break
            found += 1
        return found

    def keep(self, blocks: list[bytes]) -> None:
        """Cache the blocks of a prompt, the tail as the first to be evicted."""
        cache, refresh = self.cache, self.cache.move_to_end
        kept: list[bytes] = []
        for block in reversed(blocks):
            if block in cache:
                refresh(block)
            else:
                cache[block] = None
                kept.append(block)
        lost = [cache.popitem(last=False)[0] for _ in range(len(cache) - CACHE_BLOCKS)]
        if self._publishes:
            _note(kept, self.added, self.removed)
            _note(lost, self.removed, self.added)

    def report(self) -> ReplicaLoad:
        return ReplicaLoad(
            self.name,
            waiting=self.waiting,
            waiting_tokens=self.waiting_tokens,
            running=self.running,
            kv_usage=min(1.0, self.running_blocks / CACHE_BLOCKS),
            image_slots_free=max(0, IMAGE_SLOTS - self.images),
        )


def _note(blocks: list[bytes], changes: dict[bytes, None], opposite: dict[bytes, None]) -> None:
    """Note a change of blocks, unless it takes back one that was not told yet."""
    for block in blocks:
        if block in opposite:
            del opposite[block]
        else:
            changes[block] = None


class _Policy:
    """A rule that chooses the replica of a request."""

    def choose(self, asked: _Asked) -> int:
        raise NotImplementedError

    def submitted(self, asked: _Asked) -> None:
        """Take in that the request was sent to the replica that was chosen."""

    def began(self, asked: _Asked) -> None:
        """Take in that the first token of an answer has come."""

    def ended(self, asked: _Asked) -> None:
        """Take in that a request has ended."""

    def report(self, replica: _SimulatedReplica) -> None:
        """Take in what a replica reports every 250 ms."""


class _RoundRobin(_Policy):
    def __init__(self, count: int) -> None:
        self._count = count
        self._next = 0

    def choose(self, asked: _Asked) -> int:
        self._next = (self._next + 1) % self._count
        return self._next


class _PowerOfTwo(_Policy):
    """The rule takes two replicas at random, and of them the one with fewer open requests."""

    def __init__(self, count: int, seed: int) -> None:
        self._rnd = random.Random(seed)
        self._open = [0] * count

    def choose(self, asked: _Asked) -> int:
        count = len(self._open)
        one, other = int(self._rnd.random() * count), int(self._rnd.random() * count)
        return one if self._open[one] <= self._open[other] else other

    def submitted(self, asked: _Asked) -> None:
        self._open[asked.replica] += 1

    def ended(self, asked: _Asked) -> None:
        self._open[asked.replica] -= 1


class _CacheAwareTree(_Policy):
    """The cache-aware rule of SGLang's router (sgl-router at 08fc574, with its defaults): while open requests are
    unbalanced, the replica with the fewest; else the one that the tree of past prompts says has the longest prefix, if
    that is more than half of the prompt; else the one with the smallest tree."""

    CACHE_THRESHOLD, BALANCE_ABS, BALANCE_REL = 0.5, 32, 1.1

    def __init__(self, count: int) -> None:
        self._open = np.zeros(count, np.int64)
        self._sizes = np.zeros(count, np.int64)
        self._owners: dict[bytes, int] = {}
        """The replica that first had a block: the tree tells one of those that had it."""

    def choose(self, asked: _Asked) -> int:
        most, least = int(self._open.max()), int(self._open.min())
        if most - least > self.BALANCE_ABS and most > least * self.BALANCE_REL:
            return int(self._open.argmin())
        blocks, owners = asked.blocks, self._owners
        low, high = 0, len(blocks) + 1
        while high - low > 1:
            middle = (low + high) >> 1
            low, high = (middle, high) if blocks[middle - 1] in owners else (low, middle)
        if blocks and low / len(blocks) > self.CACHE_THRESHOLD:
            return owners[blocks[low - 1]]
        return int(self._sizes.argmin())

    def submitted(self, asked: _Asked) -> None:
        self._open[asked.replica] += 1
        for block in reversed(asked.blocks):
            if block in self._owners:
                break
            self._owners[block] = asked.replica
            self._sizes[asked.replica] += 1

    def ended(self, asked: _Asked) -> None:
        self._open[asked.replica] -= 1


class _Weft(_Policy):
    def __init__(self, count: int, seed: int) -> None:
        self._router = Router(BLOCK, seed)
        self._router.set_replicas([f"r{number}" for number in range(count)])

    def choose(self, asked: _Asked) -> int:
        chosen = self._router.choose(asked.route)
        assert chosen is not None
        return int(chosen[1:])

    def submitted(self, asked: _Asked) -> None:
        self._router.submitted(f"r{asked.replica}", asked.route)

    def began(self, asked: _Asked) -> None:
        self._router.began(f"r{asked.replica}", asked.route)

    def ended(self, asked: _Asked) -> None:
        self._router.ended(f"r{asked.replica}", asked.route)

    def report(self, replica: _SimulatedReplica) -> None:
        self._router.update(replica.report())
        if replica.added or replica.removed:
            self._router.cached(replica.name, replica.added, replica.removed)


def _policy(name: str, count: int, seed: int) -> _Policy:
    match name:
        case "round robin":
            return _RoundRobin(count)
        case "power of two":
            return _PowerOfTwo(count, seed)
        case "cache-aware tree":
            return _CacheAwareTree(count)
        case _:
            return _Weft(count, seed)


class _Run:
    """One policy under one work."""

    def __init__(self, work: RouterWork, policy: str, rate: float, advance: Callable[[int], None]) -> None:
        self._work = work
        self._name = policy
        self._rate = rate
        self._advance = advance
        self._policies = [_policy(policy, work.replicas, work.seed + edge) for edge in range(work.edges)]
        self._workload = _Workload(work.workload, work.seed)
        publishes = policy == "weft"
        self._replicas = [_SimulatedReplica(number, publishes=publishes) for number in range(work.replicas)]
        self._events: list[tuple[float, int, int, _Asked]] = []
        """Time, an order among equal times, whether the answer is at its end, and the request."""
        self._num_events = 0
        self._queued = np.zeros(work.requests, np.float32)
        self._first_tokens = np.zeros(work.requests, np.float32)
        self._num_begun = self._num_first = 0
        self._prompt_tokens = self._cached_tokens = 0
        self.prefill_seconds = 0.0
        self._decisions: list[int] = []

    def figures(self) -> PolicyFigures:
        now, reported = 0.0, 0.0
        for count, now in enumerate(self._arrivals()):
            while self._events and self._events[0][0] <= now:
                self._happen()
            if now - reported >= REPORT_SECONDS:
                reported = now
                self._report()
            self._arrive(now, self._policies[count % len(self._policies)], timed=count % 16 < len(self._policies))
            if count % 1000 == 999:
                self._advance(1000)
        while self._events:
            self._happen()
        queue, first = self._queued[: self._num_begun] * 1e3, self._first_tokens[: self._num_first] * 1e3
        decisions = np.array(self._decisions) / 1e3
        busy = [replica.busy_seconds for replica in self._replicas]
        return PolicyFigures(
            policy=self._name,
            hit_rate=self._cached_tokens / max(1, self._prompt_tokens),
            queue_p50_ms=float(np.percentile(queue, 50)),
            queue_p99_ms=float(np.percentile(queue, 99)),
            ttft_p50_ms=float(np.percentile(first, 50)),
            ttft_p99_ms=float(np.percentile(first, 99)),
            imbalance=max(busy) / (sum(busy) / len(busy)),
            decision_p50_us=float(np.percentile(decisions, 50)),
            decision_mean_us=float(decisions.mean()),
            decision_p99_us=float(np.percentile(decisions, 99)),
            simulated_s=now,
        )

    def _arrivals(self) -> Iterator[float]:
        """Yield the times at which requests come, in batches of random numbers."""
        rnd = np.random.default_rng(self._work.seed)
        quiet = 4 / (3 + BURST_RATIO)
        now, left = 0.0, self._work.requests
        while left:
            gaps = rnd.exponential(1 / self._rate, min(left, 4096))
            for gap in gaps.tolist():
                if self._work.arrivals == "bursty":
                    is_burst = now % BURST_SECONDS < BURST_SECONDS / 4
                    gap /= quiet * (BURST_RATIO if is_burst else 1.0)
                now += gap
                yield now
            left -= len(gaps)

    def _report(self) -> None:
        for replica in self._replicas:
            if replica.changed:
                replica.changed = False
                for policy in self._policies:
                    policy.report(replica)
                replica.added, replica.removed = {}, {}

    def _arrive(self, now: float, policy: _Policy, *, timed: bool) -> None:
        asked = self._workload.next()
        asked.arrived = now
        asked.policy = policy
        began = time.thread_time_ns() if timed else 0
        asked.replica = policy.choose(asked)
        policy.submitted(asked)
        if timed:
            self._decisions.append(time.thread_time_ns() - began)
        replica = self._replicas[asked.replica]
        replica.queue(asked)
        replica.images += asked.route.is_image
        replica.changed = True
        self._begin_next(replica, now)

    def _begin_next(self, replica: _SimulatedReplica, now: float) -> None:
        """Begin the next prompt of a replica, if nothing is in the way."""
        if replica.is_busy or not replica.waiting or replica.running >= MAX_RUNNING:
            return
        asked = replica.next()
        needed = len(asked.blocks) + asked.output // BLOCK
        if replica.running_blocks + needed > CACHE_BLOCKS and replica.running:
            return
        asked.cached = replica.find(asked) * BLOCK
        replica.begin(asked)
        replica.running_blocks += needed
        if asked.blocks and asked.route.tenant != FLOOD:
            self._prompt_tokens += asked.tokens
            self._cached_tokens += asked.cached
            self._queued[self._num_begun] = now - asked.arrived
            self._num_begun += 1
        rate = CHUNK / (CHUNK / PREFILL_TOKENS_PER_S + (self._step(replica) if replica.running > 1 else 0.0))
        seconds = PREFILL_SECONDS + (asked.tokens - asked.cached) / rate
        replica.busy_seconds += seconds
        self.prefill_seconds += seconds
        self._push(now + seconds, 0, asked)

    def _happen(self) -> None:
        now, _, is_end, asked = heapq.heappop(self._events)
        replica = self._replicas[asked.replica]
        replica.changed = True
        if is_end:
            replica.running -= 1
            replica.running_blocks -= len(asked.blocks) + asked.output // BLOCK
            replica.images -= asked.route.is_image
            asked.policy.ended(asked)
            replica.keep(self._workload.answered(asked))
        else:
            replica.is_busy = False
            asked.policy.began(asked)
            if asked.blocks and asked.route.tenant != FLOOD:
                self._first_tokens[self._num_first] = now - asked.arrived
                self._num_first += 1
            replica.keep(asked.blocks)
            self._push(now + asked.output * self._step(replica), 1, asked)
        self._begin_next(replica, now)

    def _step(self, replica: _SimulatedReplica) -> float:
        return STEP_SECONDS + STEP_SECONDS_PER_REQUEST * replica.running

    def _push(self, at: float, is_end: int, asked: _Asked) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at, self._num_events, is_end, asked))


def simulate(work: RouterWork, advance: Advance, policies: Sequence[str] = POLICIES) -> RouterReport:
    """Run policies under the same requests. The rate of 100 % load is found first: power of two choices, with as
    many requests as a tenth of the work, at a rate at which none waits."""
    sample = RouterWork(
        workload=work.workload, replicas=max(1, work.replicas // 10), requests=max(1000, work.requests // 10),
        seed=work.seed,
    )  # fmt: skip
    was_collected = gc.isenabled()
    gc.disable()  # millions of objects, and no cycles among those that go
    try:
        trial = _Run(sample, "power of two", 10.0 * sample.replicas, lambda count: None)
        trial.figures()
        rate = work.load * work.replicas / (trial.prefill_seconds / sample.requests)
        figures = []
        for policy in policies:
            run = _Run(work, policy, rate, lambda count, policy=policy: advance(policy, count))  # type: ignore[misc]
            figures.append(run.figures())
    finally:
        if was_collected:
            gc.enable()
    return RouterReport(work=work, requests_per_s=rate, figures=figures)
