"""The router's rules, whatever happened before: who is chosen, who never is, and what a cached prefix is worth."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import EFFORT
from weft.cluster.router import (
    ADAPTER_TOKENS,
    BUCKET_RATIO,
    BUCKET_TOKENS,
    CACHED_WEIGHT,
    KV_TOKENS,
    MAX_SESSIONS,
    RUNNING_TOKENS,
    SESSION_TOKENS,
    ReplicaLoad,
    Router,
    RouteRequest,
)
from weft.scheduler.prefix_digests import MAX_PUBLISHED

KEY = 64
seeds = st.integers(0, 2**32)


def chain(*numbers: int) -> tuple[bytes, ...]:
    """The digests of a prompt, each of which tells of those before it."""
    return tuple(bytes(numbers[: i + 1]) for i in range(len(numbers)))


def asking(keys: Sequence[bytes] = (), **fields: object) -> RouteRequest:
    return RouteRequest(**({"prefix_keys": keys, "num_tokens": KEY * len(keys) + 10} | fields))  # type: ignore[arg-type]


class Model:
    """A router, and the same state in the plainest form, brought along by random events."""

    def __init__(self, seed: int, num_replicas: int = 6) -> None:
        self.rnd = random.Random(seed)
        self.router = Router(KEY, seed)
        self.names = [f"r{i}" for i in range(num_replicas)]
        self.cached: dict[str, set[bytes]] = {}
        self.loads: dict[str, ReplicaLoad] = {}
        self.open: list[tuple[str, RouteRequest]] = []
        self.unreported: dict[str, list[RouteRequest]] = {}
        self.set_replicas(self.names)

    def set_replicas(self, names: Sequence[str]) -> None:
        self.router.set_replicas(names)
        self.cached = {name: self.cached.get(name, set()) for name in names}
        self.loads = {name: self.loads.get(name, ReplicaLoad(name)) for name in names}
        self.open = [(name, request) for name, request in self.open if name in names]

    def request(self) -> RouteRequest:
        rnd = self.rnd
        keys = chain(*(rnd.randrange(2) for _ in range(rnd.randrange(7))))
        return asking(
            keys,
            num_tokens=KEY * len(keys) + rnd.randrange(1, 2000),
            adapter=rnd.choice(["", "", "a", "b"]),
            session=rnd.choice(["", "s", "t"]),
            tenant=rnd.choice(["", "x", "y"]),
            is_image=rnd.random() < 0.1,
        )

    def act(self) -> None:
        rnd = self.rnd
        name = rnd.choice(self.names)
        match rnd.randrange(6):
            case 0 if rnd.random() < 0.2:
                self.set_replicas(rnd.sample(self.names, rnd.randrange(len(self.names) + 1)))
            case 1 | 0:
                load = ReplicaLoad(
                    name,
                    waiting=rnd.randrange(4),
                    waiting_tokens=rnd.choice([0, 100, 5000]),
                    running=rnd.randrange(20),
                    kv_usage=rnd.random(),
                    image_slots_free=rnd.randrange(3),
                    draining=rnd.random() < 0.2,
                    adapters=tuple(rnd.sample(["a", "b"], rnd.randrange(3))),
                )
                self.router.update(load)
                if name in self.loads:
                    self.loads[name] = load
            case 2 | 3:
                keys = chain(*(rnd.randrange(2) for _ in range(6)))
                held = self.cached.get(name, set())
                added = set(keys[: rnd.randrange(7)]) - held
                removed = set(rnd.sample(sorted(held), min(len(held), rnd.randrange(3))))
                reset = rnd.random() < 0.1
                self.router.cached(name, sorted(added), sorted(removed), reset=reset)
                if name in self.cached:
                    self.cached[name] = added if reset else (held | added) - removed
            case 4:
                request = self.request()
                chosen = self.router.choose(request)
                if chosen is not None:
                    self.router.submitted(chosen, request)
                    self.open.append((chosen, request))
            case 5 if self.open:
                self.router.ended(*self.open.pop(rnd.randrange(len(self.open))))


@settings(max_examples=100 * EFFORT)
@given(seeds)
def test_the_index_holds_what_was_published(seed: int) -> None:
    model = Model(seed)
    for _ in range(60):
        model.act()
    expected: dict[bytes, set[str]] = {}
    for name, digests in model.cached.items():
        for digest in digests:
            expected.setdefault(digest, set()).add(name)
    router = model.router
    found = {
        digest: {name for name, replica in router._replicas.items() if replica.bit & holders}
        for digest, holders in router._index.items()
    }
    assert found == expected
    assert set(router._replicas) == set(model.loads)
    assert sum(replica.bit for replica in router._replicas.values()) >= max(router._index.values(), default=0)
    for name, request in model.open:
        router.ended(name, request)
    assert router._tenants == {}, "tenants without requests that wait take no memory"
    assert all(replica.prefill_tokens == 0 for replica in router._replicas.values())


@settings(max_examples=100 * EFFORT)
@given(seeds)
def test_a_replica_that_is_dead_draining_or_excluded_is_never_chosen(seed: int) -> None:
    model = Model(seed)
    for _ in range(60):
        model.act()
        exclude = frozenset(model.rnd.sample(model.names, model.rnd.randrange(3)))
        able = {name for name, load in model.loads.items() if not load.draining and name not in exclude}
        chosen = model.router.choose(model.request(), exclude)
        assert chosen in able if able else chosen is None


@settings(max_examples=30 * EFFORT)
@given(seeds)
def test_the_same_calls_give_the_same_choices(seed: int) -> None:
    models = Model(seed), Model(seed)
    for _ in range(60):
        for model in models:
            model.act()
        one, other = (model.router.choose(model.request()) for model in models)
        assert one == other


def cost(model: Model, name: str, request: RouteRequest) -> float:
    """What the rule says a request costs at a replica, in the plainest form; tenants aside."""
    depth = 0
    while depth < len(request.prefix_keys) and request.prefix_keys[depth] in model.cached[name]:
        depth += 1
    return model.router._replicas[name].tokens + request.num_tokens - CACHED_WEIGHT * KEY * depth


@settings(max_examples=100 * EFFORT)
@given(seeds)
def test_nothing_is_much_cheaper_than_what_is_chosen(seed: int) -> None:
    """The bound on imbalance: load is taken upon a request only for tokens that it saves, up to one bucket."""
    model = Model(seed)
    for _ in range(60):
        # Chains of published prefixes have no holes here: whole ones are added, and nothing is removed.
        name = model.rnd.choice(model.names)
        keys = chain(*(model.rnd.randrange(2) for _ in range(6)))
        model.router.cached(name, keys, [])
        model.cached[name] |= set(keys)
        model.router.update(load := ReplicaLoad(name, waiting_tokens=model.rnd.choice([0, 100, 1000, 9000]), running=3))
        model.loads[name] = load
        request = asking(chain(*(model.rnd.randrange(2) for _ in range(3))), num_tokens=2000)
        chosen = model.router.choose(request)
        assert chosen is not None
        least = min(cost(model, name, request) for name in model.names)
        most = max(replica.tokens for replica in model.router._replicas.values())
        slack = max(BUCKET_TOKENS, (BUCKET_RATIO - 1) * most)
        assert cost(model, chosen, request) <= least + slack
        if model.rnd.random() < 0.5:
            model.router.submitted(chosen, request)


def test_with_equal_caches_the_less_loaded_is_chosen() -> None:
    router = Router(KEY)
    router.set_replicas(["busy", "free"])
    keys = chain(1, 2, 3)
    for name, waiting in (("busy", 1000), ("free", 100)):
        router.cached(name, keys, [])
        router.update(ReplicaLoad(name, waiting=1, waiting_tokens=waiting))
    assert {router.choose(asking(keys)) for _ in range(50)} == {"free"}
    assert {router.choose(asking()) for _ in range(50)} == {"free"}


def test_a_cached_prefix_is_worth_a_number_of_waiting_tokens() -> None:
    keys = chain(*range(20))
    worth = int(CACHED_WEIGHT * 20 * KEY)
    for waiting, expected in ((worth - 100, "has"), (worth + 100, "has not")):
        router = Router(KEY)
        router.set_replicas(["has", "has not"])
        router.cached("has", keys, [])
        router.update(ReplicaLoad("has", waiting_tokens=waiting))
        assert {router.choose(asking(keys)) for _ in range(50)} == {expected}


def test_the_longest_of_many_prefixes_is_found_among_a_thousand_replicas() -> None:
    router = Router(KEY)
    names = [f"r{i}" for i in range(1000)]
    router.set_replicas(names)
    keys = chain(*(i % 251 for i in range(200)))
    for number, name in enumerate(names):
        router.cached(name, keys[: number // 5], [])
    assert router.choose(asking(keys)) in names[995:]
    assert router.choose(asking(keys), frozenset(names[500:])) in names[495:500]


def test_a_session_stays_until_another_replica_is_cheaper_by_a_bound() -> None:
    for waiting, expected in ((SESSION_TOKENS - 1 - RUNNING_TOKENS, {"a"}), (2 * SESSION_TOKENS, {"b"})):
        router = Router(KEY)
        router.set_replicas(["a", "b"])
        router.submitted("a", turn := asking(session="s", num_tokens=0))
        router.ended("a", turn)
        router.update(ReplicaLoad("a", waiting=1, waiting_tokens=waiting))
        assert {router.choose(asking(session="s")) for _ in range(50)} == expected
        assert router.choose(asking(session="other")) == "b"


def test_an_adapter_is_read_elsewhere_only_when_its_holder_is_loaded() -> None:
    for waiting, expected in ((ADAPTER_TOKENS - 500, "has"), (ADAPTER_TOKENS + 500, "has not")):
        router = Router(KEY)
        router.set_replicas(["has", "has not"])
        router.update(ReplicaLoad("has", waiting_tokens=waiting, adapters=("a",)))
        assert {router.choose(asking(adapter="a")) for _ in range(50)} == {expected}
        assert router.choose(asking()) == "has not"


def test_requests_for_a_new_adapter_go_where_the_first_was_sent() -> None:
    router = Router(KEY)
    router.set_replicas(f"r{i}" for i in range(5))
    chosen = []
    for _ in range(5):
        request = asking(adapter="new", num_tokens=100)
        name = router.choose(request)
        assert name is not None
        router.submitted(name, request)
        chosen.append(name)
    assert len({*chosen}) == 1
    router.update(ReplicaLoad(chosen[0]))
    assert router._adapters == {}, "what a replica reports holds"


def test_an_image_goes_where_a_latent_slot_is_free() -> None:
    router = Router(KEY)
    router.set_replicas(["full", "free"])
    router.update(ReplicaLoad("full", image_slots_free=0))
    router.update(ReplicaLoad("free", image_slots_free=2, waiting_tokens=5000))
    for _ in range(2):
        image = asking(is_image=True, num_tokens=100)
        assert router.choose(image) == "free"
        router.submitted("free", image)
    assert router.choose(asking(is_image=True)) == "full", "both slots are taken: by load then"
    assert router.choose(asking()) == "full", "text needs no slot"


@settings(max_examples=30 * EFFORT)
@given(seeds, st.integers(2, 40))
def test_a_tenant_that_floods_leaves_replicas_to_others(seed: int, num_replicas: int) -> None:
    """One tenant sends ten requests to each replica's one of another; the prompts of all of its have one prefix, which
    one replica has cached. Its own queue drives it away, and the other is never sent behind that queue."""
    router = Router(KEY, seed)
    names = [f"r{i}" for i in range(num_replicas)]
    router.set_replicas(names)
    keys = chain(*range(10))
    router.cached("r0", keys, [])
    for _ in range(10 * num_replicas):
        flood = asking(keys, tenant="flood", num_tokens=KEY * 10 + 100)
        name = router.choose(flood)
        assert name is not None
        router.submitted(name, flood)
    loads = {name: router._replicas[name].tokens for name in names}
    light = asking(keys, tenant="light")
    chosen = router.choose(light)
    assert chosen is not None
    saved = CACHED_WEIGHT * KEY * 10 if chosen == "r0" else 0
    assert loads[chosen] <= max(min(loads.values()) + BUCKET_TOKENS, min(loads.values()) * BUCKET_RATIO) + saved
    sent = [sum(request.tenant == "flood" for request in router._replicas[name].open) for name in names]
    assert min(sent) > 0, "a flood is spread over all replicas"


@settings(max_examples=100 * EFFORT)
@given(st.dictionaries(st.sampled_from("abcdet"), st.integers(1, 40), max_size=6), st.integers(1, 30))
def test_a_request_waits_for_what_a_fair_engine_computes_before_it(waiting: dict[str, int], missing: int) -> None:
    router = Router(KEY)
    router.set_replicas(["r"])
    for tenant, tokens in waiting.items():
        router.submitted("r", asking(tenant=tenant, num_tokens=tokens))
    # Token by token: the tenant is next that has had least, this one last among equals. A request counts as some more.
    left = {tenant: tokens + RUNNING_TOKENS for tenant, tokens in waiting.items()}
    own, before, had = left.get("t", 0), 0, dict.fromkeys(["t", *waiting], 0)
    left["t"] = own + missing + RUNNING_TOKENS
    while left["t"]:
        tenant = min((name for name in left if left[name]), key=lambda name: (had[name], name == "t"))
        had[tenant] += 1
        left[tenant] -= 1
        before += tenant != "t"
    assert router._replicas["r"].tokens_before("t", missing) == before + own


@settings(max_examples=30 * EFFORT)
@given(seeds, st.integers(2, 40), st.integers(1, 400))
def test_a_flood_drives_no_other_tenant_from_what_it_has_cached(seed: int, num_replicas: int, flood: int) -> None:
    router, rnd = Router(KEY, seed), random.Random(seed)
    names = [f"r{i}" for i in range(num_replicas)]
    router.set_replicas(names)
    keys, theirs = chain(*range(20)), chain(*range(100, 130))
    router.cached("r0", [*keys, *theirs], [])
    for _ in range(flood):
        request = asking(theirs[: rnd.randrange(31)], tenant="flood", num_tokens=KEY * 30 + rnd.randrange(500))
        name = router.choose(request)
        assert name is not None
        router.submitted(name, request)
    assert router.choose(asking(keys, tenant="light")) == "r0"


@settings(max_examples=20 * EFFORT)
@given(seeds, st.integers(2, 60))
def test_equal_requests_are_spread_evenly(seed: int, num_replicas: int) -> None:
    router = Router(KEY, seed)
    names = [f"r{i}" for i in range(num_replicas)]
    router.set_replicas(names)
    for _ in range(20 * num_replicas):
        request = asking(num_tokens=500)
        name = router.choose(request)
        assert name is not None
        router.submitted(name, request)
    counts = [len(router._replicas[name].open) for name in names]
    assert max(counts) <= 20 * BUCKET_RATIO**2 + 1 and min(counts) >= 20 / BUCKET_RATIO**2 - 1


def test_own_requests_count_as_they_are_and_those_of_other_edges_as_they_were_reported() -> None:
    router = Router(KEY)
    router.set_replicas(["a"])
    replica = router._replicas["a"]
    first, second = asking(num_tokens=100), asking(num_tokens=300)
    router.submitted("a", first)
    assert replica.tokens == 100 + RUNNING_TOKENS
    router.update(ReplicaLoad("a", waiting=1, waiting_tokens=100))
    assert replica.tokens == 100 + RUNNING_TOKENS, "the report is of the same request"
    router.update(ReplicaLoad("a", waiting=2, waiting_tokens=600, running=1))
    assert replica.tokens == 600 + 3 * RUNNING_TOKENS, "two are another edge's"
    router.submitted("a", second)
    router.began("a", first)
    router.began("a", first)
    assert replica.tokens == 500 + 300 + 4 * RUNNING_TOKENS
    router.ended("a", first)
    for _ in range(2):
        router.ended("a", second)
    assert replica.tokens == 500 + 2 * RUNNING_TOKENS
    router.update(ReplicaLoad("a", kv_usage=1.0))
    assert replica.tokens == KV_TOKENS


def test_digests_are_bounded() -> None:
    router = Router(KEY)
    router.set_replicas(["a"])
    digests = [number.to_bytes(8, "little") for number in range(2 * MAX_PUBLISHED)]
    router.cached("a", digests, [])
    assert len(router._index) == MAX_PUBLISHED
    router.cached("a", digests[MAX_PUBLISHED:], digests[:MAX_PUBLISHED])
    assert set(router._index) == set(digests[MAX_PUBLISHED:]), "what is removed makes room for what is added"


def test_sessions_are_bounded() -> None:
    router = Router(KEY)
    router.set_replicas(["a"])
    for number in range(MAX_SESSIONS + 10):
        router.submitted("a", request := asking(session=str(number)))
        router.ended("a", request)
    assert len(router._sessions) == MAX_SESSIONS and "0" not in router._sessions
