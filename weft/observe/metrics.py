"""Prometheus metrics, under the names that dashboards know."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import process_time
from typing import Protocol

from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from weft.engine_stats import EngineStats, ReplicaStats
from weft.types import FinishReason, ModelInfo


class Histogram:
    """A histogram is written by one thread, the event loop's, so it needs no lock; it is read when it is scraped."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of values in each bucket; in the last one, of those above all bounds."""
        return tuple(self._counts)

    def quantile(self, share: float, counts: Sequence[int]) -> float:
        """Estimate the value below which this share of the values lies, of which there are so many in each bucket."""
        wanted, below = share * sum(counts), 0
        for number, count in enumerate(counts[:-1]):
            if count and below + count >= wanted:
                low = self._bounds[number - 1] if number else 0.0
                return low + (self._bounds[number] - low) * (wanted - below) / count
            below += count
        return self._bounds[-1]

    def buckets(self) -> list[tuple[str, float]]:
        """Return each bound as Prometheus writes it, and how many values were not above it."""
        rows: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            seen += count
            rows.append((str(bound), seen))
        return rows


CONTENT_TYPE = CONTENT_TYPE_LATEST

TTFT_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0
)  # fmt: skip
ITL_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0
)  # fmt: skip
E2E_SECONDS = (
    0.005, 0.01, 0.025,
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0
)  # fmt: skip

STAGE_SECONDS = (0.001, 0.0025, *E2E_SECONDS)
NUM_TOKENS = tuple(digit * 10.0**power for power in range(6) for digit in (1, 2, 5))

StatReader = Callable[[EngineStats], float]

GAUGES: tuple[tuple[str, str, StatReader], ...] = (
    ("weft_num_requests_running", "Requests in the running batch.", lambda stats: stats.running),
    ("weft_num_requests_waiting", "Requests in the queue.", lambda stats: stats.waiting),
    (
        "weft_kv_cache_usage_perc",
        "Share of the cache's blocks in use; 1 is full.",
        lambda stats: stats.blocks_used / max(stats.blocks_total, 1),
    ),
    ("weft_prepared", "1 when nothing is left to compile or capture.", lambda stats: stats.prepared),
    (
        "weft_images_running",
        "Images that are generated now, or whose prompts are encoded.",
        lambda stats: stats.images_running,
    ),
    ("weft_images_waiting", "Images in the engine's queue.", lambda stats: stats.images_waiting),
    (
        "weft_embedding_bytes",
        "Held by images, their latents and the hidden states of their prompts, and by tensors of clients.",
        lambda stats: stats.embedding_bytes,
    ),
)

REPLICA_GAUGES: tuple[tuple[str, str, Callable[[ReplicaStats], float]], ...] = (
    ("weft_replica_ready", "1 while the replica takes requests.", lambda own: own.state == "ready"),
    ("weft_replica_requests_running", "Requests in the replica's steps.", lambda own: own.running),
    ("weft_replica_requests_waiting", "Requests that wait at the replica.", lambda own: own.waiting),
    ("weft_replica_kv_cache_usage_perc", "The used part of its KV cache, from 0 to 1.", lambda own: own.kv_usage),
    ("weft_replica_engine_restarts", "Times that its engine was replaced.", lambda own: own.restarts),
)

LEDGER_KINDS = ("weights", "kv", "activations", "graphs", "others", "total")

COUNTERS: tuple[tuple[str, str, StatReader], ...] = (
    ("weft_prompt_tokens", "Prompt tokens of requests taken.", lambda stats: stats.prompt_tokens),
    ("weft_generation_tokens", "Tokens generated.", lambda stats: stats.generation_tokens),
    ("weft_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda stats: stats.prefix_queries),
    ("weft_prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda stats: stats.prefix_hits),
    ("weft_num_preemptions", "Requests that had to give up their blocks.", lambda stats: stats.preemptions),
    ("weft_spec_decode_num_drafts", "Drafts verified.", lambda stats: stats.drafts),
    ("weft_spec_decode_num_draft_tokens", "Tokens drafted and verified.", lambda stats: stats.draft_tokens),
    ("weft_spec_decode_num_accepted_tokens", "Drafted tokens that were right.", lambda stats: stats.accepted_tokens),
    ("weft_images", "Images generated.", lambda stats: stats.images),
    ("weft_denoise_steps", "Denoise steps made.", lambda stats: stats.denoise_steps),
    ("weft_image_encode_seconds", "Images' time in their prompts' stage.", lambda stats: stats.encode_seconds),
    ("weft_image_denoise_seconds", "Images' time in their denoise steps.", lambda stats: stats.denoise_seconds),
)


OWN_PREFIX, ALIAS_PREFIX = "weft_", "vllm:"
WEFT_ALONE = frozenset(
    {
        "weft_prepared",
        "weft_engine_restarts",
        "weft_requests_moved",
        *(name for name, _, _ in REPLICA_GAUGES),
        "weft_num_requests_rejected",
        "weft_fields_without_effect",
        "weft_images",
        "weft_images_running",
        "weft_images_waiting",
        "weft_embedding_bytes",
        "weft_memory_bytes",
        "weft_denoise_steps",
        "weft_image_encode_seconds",
        "weft_image_denoise_seconds",
    }
)
"""Metrics without an alias; the others are exported a second time, under the names that vLLM gives them."""


class StatsSource(Protocol):
    """The part of an engine that is read when the metrics are scraped."""

    @property
    def model(self) -> ModelInfo: ...

    def stats(self) -> EngineStats: ...


class Metrics(Collector):
    """The metrics of one served model. A client's string never becomes a label: names are the operator's."""

    def __init__(self, model_name: str, source: StatsSource) -> None:
        self._model_name = model_name
        self._source = source
        self.time_to_first_token = Histogram(TTFT_SECONDS)
        self.inter_token_latency = Histogram(ITL_SECONDS)
        self.e2e_latency = Histogram(E2E_SECONDS)
        self.request_queue_time = Histogram(STAGE_SECONDS)
        self.request_prefill_time = Histogram(STAGE_SECONDS)
        self.request_decode_time = Histogram(STAGE_SECONDS)
        self.request_prompt_tokens = Histogram(NUM_TOKENS)
        self.request_generation_tokens = Histogram(NUM_TOKENS)
        self._finished = {model_name: dict.fromkeys(FinishReason, 0)}
        self._rejected = 0
        self._without_effect: dict[str, int] = {}

    def finished(self, model_name: str, reason: FinishReason, seconds: float) -> None:
        """Count a finished request. `model_name` is the name of the model, or of one of its adapters."""
        self._finished.setdefault(model_name, dict.fromkeys(FinishReason, 0))[reason] += 1
        self.e2e_latency.observe(seconds)

    def rejected(self) -> None:
        self._rejected += 1

    def left_aside(self, fields: Mapping[str, bool]) -> None:
        """Count fields that were accepted without effect; those of no interface (false) as one."""
        for field, known in fields.items():
            label = field if known else "unknown"
            self._without_effect[label] = self._without_effect.get(label, 0) + 1

    def collect(self) -> Iterator[Metric]:
        for family in self._own():
            yield family
            if family.name not in WEFT_ALONE:
                yield _alias(family)

    def _own(self) -> Iterator[Metric]:
        stats = self._source.stats()
        for name, doc, read in GAUGES:
            gauge = GaugeMetricFamily(name, doc, labels=["model_name"])
            gauge.add_metric([self._model_name], read(stats))
            yield gauge
        yield self._memory(stats)
        for name, doc, read in COUNTERS:
            yield self._counter(name, doc, read(stats))
        yield self._counter("weft_engine_restarts", "Times the engine process was replaced.", stats.restarts)
        yield self._counter("weft_num_requests_rejected", "Requests answered 429.", self._rejected)
        yield self._counter("weft_requests_moved", "Requests that went on at another replica.", stats.moved_requests)
        yield from self._replicas(stats)
        yield self._fields_without_effect()
        yield self._finished_by_reason()
        for name, doc, histogram in self._histograms():
            yield self._histogram(name, doc, histogram)

    def _histograms(self) -> tuple[tuple[str, str, Histogram], ...]:
        return (
            (
                "weft_time_to_first_token_seconds",
                "From a request's arrival to its first token.",
                self.time_to_first_token,
            ),
            ("weft_inter_token_latency_seconds", "Between a request's tokens.", self.inter_token_latency),
            ("weft_e2e_request_latency_seconds", "From arrival to the last token.", self.e2e_latency),
            ("weft_request_queue_time_seconds", "In the engine's queue.", self.request_queue_time),
            ("weft_request_prefill_time_seconds", "From there to the first token.", self.request_prefill_time),
            ("weft_request_decode_time_seconds", "From the first token to the last.", self.request_decode_time),
            ("weft_request_prompt_tokens", "Tokens of a request's prompt.", self.request_prompt_tokens),
            ("weft_request_generation_tokens", "Tokens of a request's answer.", self.request_generation_tokens),
        )

    def _memory(self, stats: EngineStats) -> Metric:
        """Return what is in use now (allocated, reserved), and what the engine planned or measured at its start."""
        gauge = GaugeMetricFamily(
            "weft_memory_bytes", "Memory of the engine's device, by kind.", labels=["model_name", "kind"]
        )
        gauge.add_metric([self._model_name, "allocated"], stats.memory_allocated)
        gauge.add_metric([self._model_name, "reserved"], stats.memory_reserved)
        ledger = self._source.model.memory
        for kind in LEDGER_KINDS:
            gauge.add_metric([self._model_name, kind], getattr(ledger, kind))
        return gauge

    def _counter(self, name: str, doc: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, doc, labels=["model_name"])
        counter.add_metric([self._model_name], value)
        return counter

    def _replicas(self, stats: EngineStats) -> Iterator[Metric]:
        """Return the gauges of every replica, where there are several; those of one engine are without a label."""
        for name, doc, read in REPLICA_GAUGES:
            gauge = GaugeMetricFamily(name, doc, labels=["model_name", "replica"])
            for replica, own in stats.replicas.items():
                gauge.add_metric([self._model_name, replica], read(own))
            yield gauge

    def _fields_without_effect(self) -> Metric:
        counter = CounterMetricFamily(
            "weft_fields_without_effect",
            "Requests with a field that was accepted and changed nothing.",
            labels=["model_name", "field"],
        )
        for field, count in self._without_effect.items():
            counter.add_metric([self._model_name, field], count)
        return counter

    def _finished_by_reason(self) -> Metric:
        counter = CounterMetricFamily(
            "weft_request_success", "Requests that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for model_name, counts in self._finished.items():
            for reason, count in counts.items():
                counter.add_metric([model_name, reason], count)
        return counter

    def _histogram(self, name: str, doc: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, doc, labels=["model_name"])
        family.add_metric([self._model_name], histogram.buckets(), histogram.total)
        return family


class Residence(Struct, frozen=True, kw_only=True):
    """The load history of one of several models."""

    model_name: str
    is_loaded: bool
    loads: int
    failures: int
    unloads: int


class _House(Collector):
    """The collector of all models: a family is exported once, with the samples of all of them.

    What is the api process's own stands beside them: its CPU time, under the name that Prometheus' clients give it, and
    how long its event loop stood still.
    """

    def __init__(self, models: Sequence[Metrics], residences: Sequence[Residence], stalls: Histogram | None) -> None:
        self._models = models
        self._residences = residences
        self._stalls = stalls

    def collect(self) -> Iterator[Metric]:
        for family, *others in zip(*(model.collect() for model in self._models), strict=True):
            for other in others:
                family.samples.extend(other.samples)
            yield family
        if self._residences:
            yield from self._comings_and_goings()
        yield CounterMetricFamily("process_cpu_seconds", "CPU time of the api process.", value=process_time())
        if self._stalls is not None:
            family = HistogramMetricFamily("weft_event_loop_stall_seconds", "Times the event loop stood still.")
            family.add_metric([], self._stalls.buckets(), self._stalls.total)
            yield family

    def _comings_and_goings(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily("weft_model_loaded", "1 while the model is loaded.", labels=["model_name"])
        loads = CounterMetricFamily("weft_model_loads", "Times the model was loaded.", labels=["model_name"])
        failures = CounterMetricFamily("weft_model_load_failures", "Loads that failed.", labels=["model_name"])
        unloads = CounterMetricFamily("weft_model_unloads", "Times it was unloaded.", labels=["model_name"])
        for residence in self._residences:
            labels = [residence.model_name]
            loaded.add_metric(labels, residence.is_loaded)
            loads.add_metric(labels, residence.loads)
            failures.add_metric(labels, residence.failures)
            unloads.add_metric(labels, residence.unloads)
        yield from (loaded, loads, failures, unloads)


def exposition(
    models: Sequence[Metrics], residences: Sequence[Residence] = (), stalls: Histogram | None = None
) -> bytes:
    """Return the body of an answer to a scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_House(models, residences, stalls))
    return generate_latest(registry)


def _alias(family: Metric) -> Metric:
    alias = Metric(_alias_name(family.name), family.documentation, family.type)
    alias.samples = [sample._replace(name=_alias_name(sample.name)) for sample in family.samples]
    return alias


def _alias_name(name: str) -> str:
    return ALIAS_PREFIX + name.removeprefix(OWN_PREFIX)
