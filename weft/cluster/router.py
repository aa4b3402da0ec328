"""The router chooses the replica of a request: the one where it is expected to begin first.

Everything counts in tokens of prefill. A replica's load is the tokens that wait there, and what its running requests
and a full KV cache cost beside them. The cost of a request at a replica is that load and the tokens of its prompt that
the replica has not cached; a token that is cached is worth CACHED_WEIGHT that wait. What replicas have cached is what
their engines publish (`scheduler/prefix_digests`); nothing is guessed from requests of the past.

Engines share their steps fairly among tenants, so a request does not wait behind all that waits: of each other tenant's
tokens it waits for as many as its own tenant has there, itself among them, and no more. Its load is counted so, and a
tenant that floods a replica drives no other one away from what it has cached there.

Replicas are bits of integers. The index holds for each digest the replicas that have it, and the load buckets hold the
replicas of about the same load, so that the least loaded of those that have cached so much of a prompt is found with a
few operations on integers, however many there are. Of one bucket two replicas are compared (the power of two choices):
edges that see the same loads do not all choose the same replica.

Engines free the tail of a chain before its head, so of a chain a replica has a beginning, and the deepest digest is
found by bisection. Where a block is cached twice and the older copy is evicted there can be a hole; then a prefix seems
longer than it is. So it does when two digests are equal by chance: with 4 million digests in the index once in
4 · 10^12 look-ups. Either costs a worse choice and nothing else.

The load of the edge's own requests is known as it changes; that of other edges' is what a replica reports less the
own, and as old as the report. It does no I/O and reads no clock: the same calls give the same choices.
"""

from __future__ import annotations

import random
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from weft.scheduler.prefix_digests import MAX_PUBLISHED

CACHED_WEIGHT = 2.0
"""A token that is cached is worth so many that wait: it saves time for those that come later, too."""
RUNNING_TOKENS = 64
"""Tokens of load that an open request counts as, beside those of its prompt that wait."""
KV_FULL = 0.9
KV_TOKENS = 8192
"""A replica whose KV cache is full counts as one where so many tokens more wait; one that is full to KV_FULL, none."""
SESSION_TOKENS = 256
"""A session stays at its replica unless another one is cheaper by more than this."""
ADAPTER_TOKENS = 2048
"""A replica that must first read the request's adapter counts as one where so many tokens more wait."""
MAX_TENANTS = 32
"""A request waits for a share of so many other tenants' tokens at a replica; of further tenants all tokens count."""
BUCKET_TOKENS = 64
BUCKET_RATIO = 1.125
"""Loads are of one bucket up to BUCKET_TOKENS, or up to this ratio where that is more."""
MAX_GROUPS = 4
"""So many different lengths of cached prefixes are compared."""
MAX_SESSIONS = 65_536


class ReplicaLoad(Struct, frozen=True):
    """The load of a replica, as it reports it."""

    replica: str
    waiting: int = 0
    waiting_tokens: int = 0
    """Tokens of the prompts of waiting requests, and of images, until they end, the cost of their denoise steps."""
    running: int = 0
    kv_usage: float = 0.0
    """The part of the KV cache's blocks that running requests hold, from 0 to 1."""
    image_slots_free: int = 0
    draining: bool = False
    adapters: tuple[str, ...] = ()
    """The adapters that it has in memory."""


class RouteRequest(Struct, frozen=True, eq=False):
    """The part of a request that a router must know. It is compared by identity."""

    prefix_keys: Sequence[bytes] = ()
    """The digests of its prompt, the first one first (`scheduler/prefix_digests`)."""
    num_tokens: int = 0
    """Tokens of its prompt; of an image the cost of its denoise steps."""
    adapter: str = ""
    session: str = ""
    tenant: str = ""
    is_image: bool = False


class _Submitted(Struct):
    missing: int
    """Tokens of its prompt that are to be computed."""
    report: int
    """The number of reports that the replica had made when the request was submitted."""
    waits: bool = True
    """False once it has begun to be answered."""


class _Replica:
    """The state of one replica."""

    def __init__(self, number: int, load: ReplicaLoad) -> None:
        self.id = load.replica
        self.number = number
        self.bit = 1 << number
        self.load = load
        self.reports = 0
        self.digests: set[bytes] = set()
        self.open: dict[RouteRequest, _Submitted] = {}
        self.prefill_tokens = 0
        """Tokens of the prompts of waiting requests that are to be computed."""
        self.others = 0.0
        """The load that it had by its last report, less that of this edge's own requests."""
        self.unreported_images = 0
        self.tenants: dict[str, int] = {}
        """The load of waiting requests by tenant; only tenants that have some."""
        self.bucket = -1

    @property
    def tokens(self) -> float:
        """Its load in tokens."""
        return self.others + self.prefill_tokens + RUNNING_TOKENS * len(self.open)

    def tokens_before(self, tenant: str, missing: float) -> float:
        """Return its load for a request of a tenant with so many tokens to compute: what an engine that is fair to
        tenants computes before it."""
        tokens = self.tokens
        if self.tenants and (len(self.tenants) > 1 or tenant not in self.tenants):
            share = self.tenants.get(tenant, 0) + missing + RUNNING_TOKENS
            for other, waiting in islice(self.tenants.items(), MAX_TENANTS):
                if waiting > share and other != tenant:
                    tokens -= waiting - share
        return tokens


class _LoadBuckets:
    """The replicas, as bits, by ranges of load."""

    def __init__(self) -> None:
        bounds = [0.0]
        while bounds[-1] < 2**40:
            bounds.append(max(bounds[-1] + BUCKET_TOKENS, bounds[-1] * BUCKET_RATIO))
        self._bounds = bounds
        self._masks = [0] * (len(bounds) + 1)
        self._used: list[int] = []
        """The buckets that are not empty, the least loaded first."""

    def place(self, replica: _Replica) -> None:
        bucket = bisect_right(self._bounds, replica.tokens)
        if bucket != replica.bucket:
            self.remove(replica)
            if not self._masks[bucket]:
                insort(self._used, bucket)
            self._masks[bucket] |= replica.bit
            replica.bucket = bucket

    def remove(self, replica: _Replica) -> None:
        if replica.bucket >= 0:
            self._masks[replica.bucket] ^= replica.bit
            if not self._masks[replica.bucket]:
                self._used.remove(replica.bucket)
            replica.bucket = -1

    @property
    def floor(self) -> float:
        """The load that no replica is below."""
        return self._bounds[self._used[0] - 1]

    def least(self, group: int) -> int:
        """Return those of a group, which is not empty, that are in its lowest bucket."""
        for bucket in self._used:
            if found := self._masks[bucket] & group:
                return found
        raise AssertionError("a replica without a bucket")


class Router:
    """The router of one edge: it is told of replicas, loads, digests and requests, and chooses."""

    def __init__(self, tokens_per_key: int = 64, seed: int = 0) -> None:
        self._tokens_per_key = tokens_per_key
        self._random = random.Random(seed)
        self._replicas: dict[str, _Replica] = {}
        self._by_number: list[_Replica | None] = []
        self._free_numbers: list[int] = []
        self._allowed = 0
        """The replicas that may be chosen: none that drains."""
        self._with_image_slots = 0
        self._adapters: dict[str, int] = {}
        """The replicas that have an adapter, by its name."""
        self._index: dict[bytes, int] = {}
        """The replicas that have cached a digest."""
        self._buckets = _LoadBuckets()
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._chosen: tuple[RouteRequest, _Replica, int] | None = None
        """The last choice, and how many of the request's keys the replica had cached: most often it is sent there."""
        self._tenants: dict[str, int] = {}
        """The load of waiting requests by tenant; only tenants that have some."""

    # What replicas there are, and how they are.

    def set_replicas(self, ids: Iterable[str]) -> None:
        """Take in which replicas live. What was known of others is forgotten."""
        living = dict.fromkeys(ids)
        for replica in [replica for name, replica in self._replicas.items() if name not in living]:
            self._remove(replica)
        for name in living:
            if name not in self._replicas:
                self._add(name)

    def update(self, load: ReplicaLoad) -> None:
        """Take in the report of a replica; one that is not known is ignored."""
        replica = self._replicas.get(load.replica)
        if replica is None:
            return
        if load.adapters != replica.load.adapters:
            self._set_adapters(replica, load.adapters)
        replica.load = load
        replica.reports += 1
        replica.unreported_images = 0
        pressure = max(0.0, load.kv_usage - KV_FULL) / (1 - KV_FULL)
        requests = max(0, load.waiting + load.running - len(replica.open))
        tokens = max(0, load.waiting_tokens - replica.prefill_tokens)
        replica.others = tokens + RUNNING_TOKENS * requests + KV_TOKENS * pressure
        self._allowed = self._allowed & ~replica.bit if load.draining else self._allowed | replica.bit
        self._place(replica)

    def cached(self, name: str, added: Iterable[bytes], removed: Iterable[bytes], *, reset: bool = False) -> None:
        """Take in what an engine publishes of its prefix cache, MAX_PUBLISHED digests at most. With `reset` nothing
        that was told before holds."""
        replica = self._replicas.get(name)
        if replica is None:
            return
        index, bit = self._index, replica.bit
        self._forget_digests(replica, list(replica.digests) if reset else removed)
        for digest in added:
            if len(replica.digests) >= MAX_PUBLISHED:
                break
            holders = index.get(digest)
            # Most digests have one holder, and all of these share the one integer.
            index[digest] = bit if holders is None else holders | bit
            replica.digests.add(digest)

    # Requests.

    def choose(self, request: RouteRequest, exclude: Set[str] = frozenset()) -> str | None:
        """Return the replica for a request; None when every replica drains or is excluded."""
        allowed = self._allowed
        for name in exclude:
            if name in self._replicas:
                allowed &= ~self._replicas[name].bit
        if not allowed:
            return None
        if request.is_image:
            return self._cheaper(self._buckets.least(allowed & self._with_image_slots or allowed), 0, request)[1].id
        known: dict[int, int] = {}
        best_cost, best, depth = self._cheapest(request, allowed, known)
        if request.adapter and (having := allowed & self._adapters.get(request.adapter, 0)):
            cost, replica, held = self._cheapest(request, having, known)
            if cost < best_cost:
                best_cost, best, depth = cost, replica, held
        stays = self._replicas.get(self._sessions.get(request.session, "")) if request.session else None
        if stays is not None and stays is not best and stays.bit & allowed:
            held, _ = self._deepest(request.prefix_keys, len(request.prefix_keys), stays.bit, known)
            if self._cost(stays, held, request) - SESSION_TOKENS < best_cost:
                best, depth = stays, held
        self._chosen = request, best, depth
        return best.id

    def submitted(self, name: str, request: RouteRequest) -> None:
        """Count a request that is sent to a replica, until it ends."""
        replica = self._replicas.get(name)
        if replica is None or request in replica.open:
            return
        depth = self._chosen[2] if self._chosen is not None and self._chosen[:2] == (request, replica) else None
        if depth is None:
            depth, _ = self._deepest(request.prefix_keys, len(request.prefix_keys), replica.bit, {})
        missing = max(0, request.num_tokens - depth * self._tokens_per_key)
        replica.open[request] = _Submitted(missing, replica.reports)
        replica.unreported_images += request.is_image
        self._count_waiting(replica, request.tenant, missing, 1)
        if request.adapter and request.adapter not in replica.load.adapters:
            # It will read it now: others need not do so until it reports.
            adapters = *replica.load.adapters, request.adapter
            self._set_adapters(replica, adapters)
            replica.load = replace(replica.load, adapters=adapters)
        self._place(replica)
        if request.session and not request.is_image:
            self._sessions[request.session] = name
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def began(self, name: str, request: RouteRequest) -> None:
        """Take in that the first token of an answer has come: the prompt does not wait any more."""
        replica = self._replicas.get(name)
        submitted = None if replica is None else replica.open.get(request)
        if replica is not None and submitted is not None and submitted.waits:
            submitted.waits = False
            self._count_waiting(replica, request.tenant, -submitted.missing, -1)
            self._place(replica)

    def ended(self, name: str, request: RouteRequest) -> None:
        """Forget a request that was submitted to a replica and has ended there, or was taken away from it."""
        replica = self._replicas.get(name)
        if replica is None or (submitted := replica.open.pop(request, None)) is None:
            return
        if submitted.report == replica.reports:
            replica.unreported_images -= request.is_image
        if submitted.waits:
            self._count_waiting(replica, request.tenant, -submitted.missing, -1)
        self._place(replica)

    # The choice.

    def _cheapest(self, request: RouteRequest, group: int, known: dict[int, int]) -> tuple[float, _Replica, int]:
        """Return the replica of a group where the request costs least: of those that have cached equally much the least
        loaded are compared, the longest prefix first, until one with less cached would cost more without any load. Also
        return how many of its keys that one has cached."""
        keys, limit = request.prefix_keys, len(request.prefix_keys)
        floor = float(request.num_tokens)
        if len(self._tenants) <= (request.tenant in self._tenants):
            floor += self._buckets.floor
        best: tuple[float, _Replica, int] | None = None
        for number in range(MAX_GROUPS):
            if number == MAX_GROUPS - 1:
                limit = 0
            depth, holders = self._deepest(keys, limit, group, known)
            if best is not None and floor - CACHED_WEIGHT * depth * self._tokens_per_key >= best[0]:
                break
            cost, replica = self._cheaper(self._buckets.least(holders), depth, request)
            if best is None or cost < best[0]:
                best = cost, replica, depth
            group &= ~holders
            limit = depth
            if not group:
                break
        assert best is not None
        return best

    def _deepest(self, keys: Sequence[bytes], limit: int, group: int, known: dict[int, int]) -> tuple[int, int]:
        """Return the most keys, up to a limit, that any replica of a group has cached from the first on, and those that
        have. `known` keeps the holders of keys for the next call."""
        low, high, holders = 0, limit + 1, group
        while high - low > 1:
            middle = (low + high) >> 1
            if middle not in known:
                known[middle] = self._index.get(keys[middle - 1], 0)
            if found := known[middle] & group:
                low, holders = middle, found
            else:
                high = middle
        return low, holders

    def _cheaper(self, group: int, depth: int, request: RouteRequest) -> tuple[float, _Replica]:
        """Return the cheaper of two replicas of a group, taken at random."""
        first, second = self._any_of(group), self._any_of(group)
        cost = self._cost(first, depth, request)
        if first is not second and (other := self._cost(second, depth, request)) < cost:
            return other, second
        return cost, first

    def _any_of(self, group: int) -> _Replica:
        """Return the first replica of a group from a random bit on."""
        start = int(self._random.random() * len(self._by_number))
        rest = group >> start
        bit = (rest & -rest) << start if rest else group & -group
        replica = self._by_number[bit.bit_length() - 1]
        assert replica is not None
        return replica

    def _cost(self, replica: _Replica, depth: int, request: RouteRequest) -> float:
        cached = depth * self._tokens_per_key
        cost = replica.tokens_before(request.tenant, request.num_tokens - cached)
        cost += request.num_tokens - CACHED_WEIGHT * cached
        if request.adapter and request.adapter not in replica.load.adapters:
            cost += ADAPTER_TOKENS
        return cost

    # The books.

    def _add(self, name: str) -> None:
        if not self._free_numbers:
            self._free_numbers.append(len(self._by_number))
            self._by_number.append(None)
        replica = _Replica(self._free_numbers.pop(), ReplicaLoad(name))
        self._by_number[replica.number] = replica
        self._replicas[name] = replica
        self._allowed |= replica.bit
        self._place(replica)

    def _remove(self, replica: _Replica) -> None:
        self._forget_digests(replica, list(replica.digests))
        self._set_adapters(replica, ())
        for tenant, tokens in list(replica.tenants.items()):
            self._count_waiting(replica, tenant, -tokens, 0)
        self._buckets.remove(replica)
        self._allowed &= ~replica.bit
        self._with_image_slots &= ~replica.bit
        self._by_number[replica.number] = None
        self._free_numbers.append(replica.number)
        del self._replicas[replica.id]

    def _place(self, replica: _Replica) -> None:
        self._buckets.place(replica)
        if replica.load.image_slots_free > replica.unreported_images:
            self._with_image_slots |= replica.bit
        else:
            self._with_image_slots &= ~replica.bit

    def _forget_digests(self, replica: _Replica, digests: Iterable[bytes]) -> None:
        for digest in digests:
            if digest in replica.digests:
                replica.digests.remove(digest)
                if left := self._index[digest] & ~replica.bit:
                    self._index[digest] = left
                else:
                    del self._index[digest]

    def _set_adapters(self, replica: _Replica, adapters: Sequence[str]) -> None:
        for adapter in replica.load.adapters:
            if left := self._adapters.get(adapter, 0) & ~replica.bit:
                self._adapters[adapter] = left
            else:
                self._adapters.pop(adapter, None)
        for adapter in adapters:
            self._adapters[adapter] = self._adapters.get(adapter, 0) | replica.bit

    def _count_waiting(self, replica: _Replica, tenant: str, missing: int, requests: int) -> None:
        """Count requests of a tenant that wait with so many tokens to compute; negative numbers: that wait no more."""
        replica.prefill_tokens += missing
        for counts in (replica.tenants, self._tenants):
            left = counts.get(tenant, 0) + missing + requests * RUNNING_TOKENS
            if left:
                counts[tenant] = left
            else:
                del counts[tenant]
