"""The controller of a cluster on Ray: one named actor that keeps the replicas, scales them, and publishes their table.

It is detached and restarted by Ray, because edges come and go; when no edge has asked for a table for ABANDONED_S, it
ends its replicas and itself. Replicas are detached actors too, so that they outlive it; one that died is replaced under
another name, because a name stands for one process and its cache. Nothing but JSON goes through Ray.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
import uuid
from collections import deque
from contextlib import suppress
from typing import Any

import msgspec
import ray
from msgspec.structs import replace
from ray.exceptions import ActorDiedError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weft.cluster.autoscaler import ClusterLoad, ScaleLimits, wanted_replicas
from weft.cluster.ray_messages import ClusterSpec, ClusterStatus, Joined, MemberStatus, Published, ReplicaSpec
from weft.cluster.ray_replica import ReplicaActor, actor_options
from weft.cluster.replica_set import Member, ReplicaReport, ReplicaSet

log = logging.getLogger(__name__)

NAMESPACE = "weft"
TICK_S = 0.5
POLL_S = 5.0
"""Seconds after which an edge that waits for a table is answered with the same one."""
EDGE_GONE_S = 15.0
"""Seconds after which an edge that has not asked is not waited for."""
ABANDONED_S = 60.0
SCALE_EVERY_S = 5.0
HISTORY = 200
UNREACHABLE_S = 15.0
"""Seconds after which a replica that Ray cannot reach is given up."""
STOP_S = 15.0
RECOVERY_S = 5.0


class ControllerActor:
    def __init__(self, name: str, spec: bytes) -> None:
        self._name = name
        self._spec = msgspec.json.decode(spec, type=ClusterSpec)
        # Higher than those of a controller before it.
        version = time.time_ns() // 1_000_000
        self._set = ReplicaSet(self._spec.replicas, version, self._spec.drain_timeout_s)
        self._handles: dict[str, Any] = {}
        self._polls: dict[str, asyncio.Task[bytes]] = {}
        self._unreachable_since: dict[str, float] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._edges: dict[str, tuple[float, int]] = {}
        """When each edge last asked, and the version that it had."""
        self._asked_at = time.monotonic()
        self._history: deque[ClusterLoad] = deque(maxlen=HISTORY)
        self._changed: asyncio.Event | None = None
        self._published = version
        self._unplaceable = ""
        self._is_ending = False
        self._is_recovered = False
        self._is_running = False
        self._run()

    def _run(self) -> None:
        """Have this actor run its loop, if it does not. What an actor asks of itself while Ray restarts it can be lost,
        so that whatever asks for a table or a status asks for this again."""
        if not self._is_running:
            ray.get_runtime_context().current_actor.run.remote()

    # Edges.

    async def join(self, edge: str, spec: bytes) -> bytes:
        """Let an edge in, with the number of replicas that it asks for. It must want what the others do."""
        wanted = msgspec.json.decode(spec, type=ClusterSpec)
        if wanted.digest != self._spec.digest:
            return msgspec.json.encode(Joined(refusal="it serves another model, or the same with other settings"))
        if wanted.replica.key not in ("", self._spec.replica.key):
            return msgspec.json.encode(Joined(refusal="it has another key (--cluster-key-file)"))
        self._spec = replace(
            self._spec,
            min_replicas=wanted.min_replicas,
            max_replicas=wanted.max_replicas,
            drain_timeout_s=wanted.drain_timeout_s,
        )
        limited = max(wanted.min_replicas, min(wanted.max_replicas, self._set.target))
        self._set.target = wanted.replicas if wanted.min_replicas == wanted.max_replicas else limited
        self._note(edge, 0)
        return msgspec.json.encode(Joined(key=self._spec.replica.key))

    async def next_table(self, edge: str, known: int) -> bytes:
        """Wait for a table that the edge does not know, for a while, and return the newest."""
        self._note(edge, known)
        while not self._is_recovered:
            await asyncio.sleep(TICK_S / 10)
        if known >= self._published and self._changed is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), POLL_S)
        return msgspec.json.encode(Published(self._set.table(), self._problem(), bool(self._unplaceable)))

    async def leave(self, edge: str) -> None:
        self._edges.pop(edge, None)

    def _note(self, edge: str, known: int) -> None:
        self._run()
        self._asked_at = time.monotonic()
        self._edges[edge] = (self._asked_at, known)

    # The operator.

    async def status(self) -> bytes:
        self._run()
        spec = self._spec
        return msgspec.json.encode(
            ClusterStatus(
                name=self._name,
                model=spec.replica.config.model.served_model_name or spec.replica.config.model.model,
                version=self._set.version,
                target=self._set.target,
                min_replicas=spec.min_replicas,
                max_replicas=spec.max_replicas,
                edges=len(self._edges),
                problem=self._problem(),
                pid=os.getpid(),
                replicas=[_status(member) for member in self._set.members.values()],
            )
        )

    async def drain(self, replica_id: str) -> bool:
        return self._set.drain(replica_id)

    async def restart(self) -> None:
        """Replace every replica, one at a time, without a failed request."""
        self._set.restart()

    async def scale(self, replicas: int) -> int:
        """Set the number of replicas, within the limits, and return it."""
        self._set.target = max(self._spec.min_replicas, min(self._spec.max_replicas, replicas))
        self._history.clear()
        return self._set.target

    async def end(self) -> None:
        """End all replicas."""
        self._is_ending = True
        for replica_id in list(self._handles):
            self._end(replica_id)
        if self._ending:
            await asyncio.wait(self._ending)

    # The loop.

    async def run(self) -> None:
        if self._is_running:
            return
        self._is_running = True
        self._changed = asyncio.Event()
        await self._recover()
        self._is_recovered = True
        while not self._is_ending and time.monotonic() - self._asked_at < ABANDONED_S:
            try:
                self._tick(time.monotonic())
            except RayError:
                log.exception("The controller of the cluster %s could not do its work; it tries again.", self._name)
            await asyncio.sleep(TICK_S)
        log.warning("The cluster %s ends: it was told to, or no edge has asked for %.0f s.", self._name, ABANDONED_S)
        await self.end()
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]

    async def _recover(self) -> None:
        """Find the replicas of a controller that died, and hear from them before edges are told: those that work must
        not seem to start."""
        for found in ray.util.list_named_actors(all_namespaces=True):
            prefix, _, replica_id = found["name"].rpartition("/")
            if found["namespace"] == NAMESPACE and prefix == controller_name(self._name):
                self._handles[replica_id] = ray.get_actor(found["name"], namespace=NAMESPACE)
                self._set.started(replica_id, time.monotonic())
                self._hear(replica_id, time.monotonic())
        if self._polls:
            await asyncio.wait(self._polls.values(), timeout=RECOVERY_S)
        for replica_id in list(self._handles):
            self._hear(replica_id, time.monotonic())

    def _tick(self, now: float) -> None:
        for replica_id in list(self._handles):
            self._hear(replica_id, now)
        self._scale(now)
        self._edges = {edge: seen for edge, seen in self._edges.items() if now - seen[0] < EDGE_GONE_S}
        decision = self._set.decide(now, [version for _, version in self._edges.values()])
        for replica_id in decision.stop:
            self._end(replica_id)
        if decision.start and not any(member.state == "starting" for member in self._set.members.values()):
            self._unplaceable = unplaceable(self._spec.replica, _nodes())
        for _ in range(decision.start):
            self._start(now)
        if self._set.version != self._published:
            self._published = self._set.version
            assert self._changed is not None
            self._changed.set()
            self._changed = asyncio.Event()

    def _start(self, now: float) -> None:
        replica_id = uuid.uuid4().hex[:8]
        spec = self._spec.replica
        actor = ray.remote(ReplicaActor).options(
            name=f"{controller_name(self._name)}/{replica_id}",
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            **actor_options(spec),
        )
        self._handles[replica_id] = actor.remote(msgspec.json.encode(spec))
        self._set.started(replica_id, now)

    def _hear(self, replica_id: str, now: float) -> None:
        """Take in a replica's report, if it has come, and ask for the next. A replica that is not placed yet answers
        when it is."""
        poll = self._polls.get(replica_id)
        if poll is None:
            self._polls[replica_id] = asyncio.ensure_future(_reported(self._handles[replica_id]))
            return
        if not poll.done():
            return
        del self._polls[replica_id]
        try:
            report = msgspec.json.decode(poll.result(), type=ReplicaReport)
        except (RayActorError, RayError) as error:
            since = self._unreachable_since.setdefault(replica_id, now)
            if isinstance(error, ActorDiedError) or now - since > UNREACHABLE_S:
                self._lost(replica_id, _short(error), now)
            return
        self._unreachable_since.pop(replica_id, None)
        self._unplaceable = ""
        if report.error:
            self._lost(replica_id, report.error, now)
        else:
            self._set.reported(replica_id, report)

    def _lost(self, replica_id: str, why: str, now: float) -> None:
        log.error("The replica %s is lost: %s", replica_id, why)
        self._set.died(replica_id, why, now)
        self._unreachable_since.pop(replica_id, None)
        self._end(replica_id)

    def _end(self, replica_id: str) -> None:
        handle = self._handles.pop(replica_id, None)
        self._polls.pop(replica_id, None)
        if handle is not None:
            ending = asyncio.ensure_future(_ended(handle))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    def _scale(self, now: float) -> None:
        spec = self._spec
        if spec.min_replicas == spec.max_replicas:
            return
        if self._history and now - self._history[-1].at < SCALE_EVERY_S:
            return
        ready = self._set.ready
        load = ClusterLoad(
            at=now,
            replicas=len(ready),
            waiting=sum(member.report.waiting for member in ready),
            running=sum(member.report.running for member in ready),
            kv_usage=math.fsum(member.report.kv_usage for member in ready) / max(1, len(ready)),
        )
        self._history.append(load)
        if ready:
            limits = ScaleLimits(min_replicas=spec.min_replicas, max_replicas=spec.max_replicas)
            self._set.target = wanted_replicas(tuple(self._history), self._set.target, limits)

    def _problem(self) -> str:
        return self._unplaceable or self._set.last_error


async def _reported(handle: Any) -> bytes:
    told: bytes = await handle.report.remote()
    return told


async def _ended(handle: Any) -> None:
    """End a replica's process, and its actor."""
    try:
        await asyncio.wait_for(_stopped(handle), STOP_S)
    except (RayError, TimeoutError) as error:
        log.info("The replica did not end by itself: %s", _short(error))
    ray.kill(handle)


async def _stopped(handle: Any) -> None:
    await handle.stop.remote()


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _status(member: Member) -> MemberStatus:
    report = member.report
    return MemberStatus(
        id=member.id,
        state=member.state,
        node=report.node,
        address=f"{report.host}:{report.port}" if report.port else "",
        running=report.running,
        waiting=report.waiting,
        open_requests=report.open_requests,
        kv_usage=report.kv_usage,
        engine_restarts=report.restarts,
        pid=report.pid,
        actor_pid=report.actor_pid,
    )


def controller_name(cluster: str) -> str:
    return f"weft-cluster:{cluster}"


def controller_options(cluster: str) -> dict[str, Any]:
    """Return Ray's options for the controller: beside the head, with which Ray itself would be lost, if that can be."""
    head = [node["NodeID"] for node in _nodes() if node["Alive"] and "node:__internal_head__" in node["Resources"]]
    return {
        "name": controller_name(cluster),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(head[0], soft=True) if head else "DEFAULT",
    }


def unplaceable(spec: ReplicaSpec, nodes: list[dict[str, Any]]) -> str:
    """Return why no node that there is could ever hold a replica; empty: one could."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    if any(all(node.get(name, 0.0) >= amount for name, amount in spec.asked.items()) for node in alive):
        return ""
    has = "; ".join(_resources({name: node.get(name, 0.0) for name in ("CPU", "GPU", "memory")}) for node in alive)
    return (
        f"A replica asks for {_resources(spec.asked)} on one node. The cluster's nodes have: {has or 'none is alive'}."
    )


def _resources(amounts: dict[str, float]) -> str:
    words = [f"{amount:g} {name}" for name, amount in amounts.items() if name != "memory"]
    if amounts.get("memory"):
        words.append(f"{amounts['memory'] / 2**30:.1f} GiB of memory")
    return ", ".join(words)


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes
