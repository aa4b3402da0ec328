"""The router chooses the replica of a request: the one with the fewest open tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from msgspec import Struct


class ReplicaLoad(Struct, frozen=True):
    """The load of a replica, as it reports it."""

    replica: str
    waiting: int = 0
    waiting_tokens: int = 0
    running: int = 0
    kv_usage: float = 0.0
    image_slots_free: int = 0
    draining: bool = False
    adapters: tuple[str, ...] = ()


class RouteRequest(Struct, frozen=True, eq=False):
    """What a router must know of a request. It is compared by identity."""

    prefix_keys: Sequence[bytes] = ()
    num_tokens: int = 0
    adapter: str = ""
    session: str = ""
    tenant: str = ""
    is_image: bool = False


class Router:
    def __init__(self, tokens_per_key: int = 64, seed: int = 0) -> None:
        self._open: dict[str, dict[RouteRequest, int]] = {}

    def set_replicas(self, ids: Iterable[str]) -> None:
        self._open = {name: self._open.get(name, {}) for name in ids}

    def update(self, load: ReplicaLoad) -> None:
        pass

    def cached(self, name: str, added: Iterable[bytes], removed: Iterable[bytes], *, reset: bool = False) -> None:
        pass

    def choose(self, request: RouteRequest, exclude: Set[str] = frozenset()) -> str | None:
        names = [name for name in self._open if name not in exclude]
        return min(names, key=lambda name: sum(self._open[name].values()), default=None)

    def submitted(self, name: str, request: RouteRequest) -> None:
        if name in self._open:
            self._open[name][request] = request.num_tokens + 64

    def ended(self, name: str, request: RouteRequest) -> None:
        self._open.get(name, {}).pop(request, None)
