"""Tests the names, types and labels that dashboards rely on."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from tests import virtual_time
from tests.api.http import COMPLETIONS, PROMPT, chat, request, request_app
from tests.api.scripted_engine import ScriptedEngine, answer, next_turn
from weft.api.app import build_app
from weft.config import load
from weft.engine_stats import MemoryLedger
from weft.errors import Overloaded
from weft.observe.metrics import REPLICA_GAUGES, Histogram, Metrics, exposition
from weft.types import FinishReason, Output

CONTRACT = {
    "weft_num_requests_running": "gauge",
    "weft_num_requests_waiting": "gauge",
    "weft_kv_cache_usage_perc": "gauge",
    "weft_prepared": "gauge",
    "weft_images_running": "gauge",
    "weft_images_waiting": "gauge",
    "weft_embedding_bytes": "gauge",
    "weft_memory_bytes": "gauge",
    "weft_prompt_tokens_total": "counter",
    "weft_generation_tokens_total": "counter",
    "weft_prefix_cache_queries_total": "counter",
    "weft_prefix_cache_hits_total": "counter",
    "weft_spec_decode_num_drafts_total": "counter",
    "weft_spec_decode_num_draft_tokens_total": "counter",
    "weft_spec_decode_num_accepted_tokens_total": "counter",
    "weft_num_preemptions_total": "counter",
    "weft_images_total": "counter",
    "weft_denoise_steps_total": "counter",
    "weft_image_encode_seconds_total": "counter",
    "weft_image_denoise_seconds_total": "counter",
    "weft_engine_restarts_total": "counter",
    "weft_requests_moved_total": "counter",
    **{name: "gauge" for name, _, _ in REPLICA_GAUGES},
    "weft_num_requests_rejected_total": "counter",
    "weft_fields_without_effect_total": "counter",
    "weft_request_success_total": "counter",
    "weft_time_to_first_token_seconds": "histogram",
    "weft_inter_token_latency_seconds": "histogram",
    "weft_e2e_request_latency_seconds": "histogram",
    "weft_request_queue_time_seconds": "histogram",
    "weft_request_prefill_time_seconds": "histogram",
    "weft_request_decode_time_seconds": "histogram",
    "weft_request_prompt_tokens": "histogram",
    "weft_request_generation_tokens": "histogram",
}


WEFT_ALONE = {
    "weft_prepared",
    "weft_memory_bytes",
    "weft_engine_restarts_total",
    "weft_requests_moved_total",
    *(name for name, _, _ in REPLICA_GAUGES),
    "weft_num_requests_rejected_total",
    "weft_fields_without_effect_total",
} | {name for name in CONTRACT if "image" in name or "denoise" in name or "embedding" in name}


def samples(text: str) -> dict[str, float]:
    """Return every sample by its name and its labels, the model's own label left out."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            found[sample.name + ("" if not labels else str(labels))] = sample.value
    return found


def test_names_types_and_labels() -> None:
    text = exposition([Metrics("m", ScriptedEngine())]).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    types = {name + ("_total" if family.type == "counter" else ""): family.type for name, family in families.items()}
    aliases = {name.replace("weft_", "vllm:"): kind for name, kind in CONTRACT.items() if name not in WEFT_ALONE}
    assert types == CONTRACT | aliases | {"process_cpu_seconds_total": "counter"}
    assert [sample.labels for sample in families.pop("process_cpu_seconds").samples] == [{}]
    for family in families.values():
        assert family.documentation
        for sample in family.samples:
            extra = {"le"} if sample.name.endswith("_bucket") else set()
            extra |= {"finished_reason"} if family.name.endswith("request_success") else set()
            extra |= {"replica"} if family.name.startswith("weft_replica_") else set()
            extra |= {"kind"} if family.name == "weft_memory_bytes" else set()
            assert sample.labels.keys() == {"model_name"} | extra
            assert sample.labels["model_name"] == "m"


def test_an_alias_tells_what_its_own_tells() -> None:
    metrics = Metrics("m", ScriptedEngine())
    metrics.time_to_first_token.observe(0.03)
    metrics.finished("m", FinishReason.STOP, 0.5)
    found = samples(exposition([metrics]).decode())
    aliases = {name: value for name, value in found.items() if name.startswith("vllm:")}
    assert len(aliases) > 50
    for name, value in aliases.items():
        assert found[name.replace("vllm:", "weft_", 1)] == value, name


def test_the_engine_s_figures() -> None:
    found = samples(exposition([Metrics("m", ScriptedEngine())]).decode())
    assert found["weft_num_requests_waiting"] == 2
    assert found["weft_kv_cache_usage_perc"] == 0.5
    assert found["weft_prompt_tokens_total"] == 7
    assert found["weft_generation_tokens_total"] == 8
    assert found["weft_prefix_cache_queries_total"] == 9
    assert found["weft_prefix_cache_hits_total"] == 4
    assert found["weft_spec_decode_num_drafts_total"] == 2
    assert found["weft_spec_decode_num_draft_tokens_total"] == 6
    assert found["weft_spec_decode_num_accepted_tokens_total"] == 5
    assert found["weft_num_preemptions_total"] == 3
    assert found["weft_engine_restarts_total"] == 1


def test_a_served_request_is_counted_once() -> None:
    app = build_app(ScriptedEngine(answer("ab", "cde", "f")), load({"served_model_name": "mine"}, env={}))
    for stream in (False, True):
        body = PROMPT | {"model": "mine", "stream": stream, "prompt": ["a", "b"]}
        assert request_app(app, "POST", COMPLETIONS, json=body).status_code == 200
    response = request_app(app, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = samples(response.text)
    assert found["weft_time_to_first_token_seconds_count"] == 4
    assert found["weft_inter_token_latency_seconds_count"] == 4 * 4, "the tokens after the first delta"
    assert found["weft_e2e_request_latency_seconds_count"] == 4
    assert found["weft_request_success_total{'finished_reason': 'stop'}"] == 4
    assert found["weft_request_success_total{'finished_reason': 'abort'}"] == 0
    assert 'model_name="mine"' in response.text and "scripted" not in response.text


def test_a_client_s_string_is_never_a_label() -> None:
    app = build_app(ScriptedEngine(), load(env={}))
    request_app(app, "POST", COMPLETIONS, json=PROMPT | {"model": "evil", "user": "evil", "request_id": "evil"})
    assert "evil" not in request_app(app, "GET", "/metrics").text


def test_rejections_and_failures_are_counted() -> None:
    app = build_app(ScriptedEngine(refuse=Overloaded("full")), load(env={}))
    request_app(app, "POST", COMPLETIONS, json=PROMPT)
    assert samples(request_app(app, "GET", "/metrics").text)["weft_num_requests_rejected_total"] == 1
    app = build_app(ScriptedEngine([next_turn, RuntimeError("broken")]), load(env={}))
    request_app(app, "POST", COMPLETIONS, json=PROMPT)
    found = samples(request_app(app, "GET", "/metrics").text)
    assert found["weft_request_success_total{'finished_reason': 'error'}"] == 1
    app = build_app(ScriptedEngine([5.0]), load({"request_timeout_s": 0.01}, env={}))
    request_app(app, "POST", COMPLETIONS, run=virtual_time.run, json=PROMPT)
    found = samples(request_app(app, "GET", "/metrics").text)
    assert found["weft_request_success_total{'finished_reason': 'timeout'}"] == 1


def test_a_scrape_enqueues_nothing() -> None:
    engine = ScriptedEngine()
    request(engine, "GET", "/metrics")
    assert not engine.submitted
    chat(engine)
    assert len(engine.submitted) == 1


@pytest.mark.parametrize(("value", "bucket"), [(0.5, 0), (1.0, 0), (1.5, 1), (2.0, 1), (9.0, 2)])
def test_a_histogram_s_bounds_belong_to_their_buckets(value: float, bucket: int) -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(value, times=3)
    assert histogram.total == value * 3
    assert histogram.buckets() == [
        (bound, 3 if index >= bucket else 0) for index, bound in enumerate(("1.0", "2.0", "+Inf"))
    ]


def test_every_reason_is_counted() -> None:
    metrics = Metrics("m", ScriptedEngine())
    for reason in FinishReason:
        metrics.finished("m", reason, 1.0)
    found = samples(exposition([metrics]).decode())
    assert [found[f"weft_request_success_total{{'finished_reason': '{reason}'}}"] for reason in FinishReason] == [1] * 6


def test_every_stage_of_a_request_is_timed_and_its_tokens_counted() -> None:
    first = Output(text="ab", token_ids=[1, 2], queue_seconds=0.25)
    app = build_app(ScriptedEngine([0.3, first, 0.05, *answer("c")]), load(env={}))
    body = PROMPT | {"prompt": "y" * 40}
    assert request_app(app, "POST", COMPLETIONS, run=virtual_time.run, json=body).status_code == 200
    found = samples(request_app(app, "GET", "/metrics").text)
    assert found["weft_request_queue_time_seconds_sum"] == 0.25
    assert found["weft_time_to_first_token_seconds_sum"] == pytest.approx(0.3)
    assert found["weft_e2e_request_latency_seconds_sum"] == pytest.approx(0.35)
    assert found["weft_request_prefill_time_seconds_sum"] == pytest.approx(0.3 - 0.25)
    assert found["weft_request_decode_time_seconds_sum"] == pytest.approx(0.05)
    assert found["weft_request_prompt_tokens_bucket{'le': '20.0'}"] == 0
    assert found["weft_request_prompt_tokens_bucket{'le': '50.0'}"] == 1
    assert found["weft_request_generation_tokens_sum"] == 3


@pytest.mark.parametrize(("told_last", "num_observed"), [(None, 0), (0.0, 1), (0.25, 1)])
def test_a_queue_that_nobody_knows_of_is_not_observed(told_last: float | None, num_observed: int) -> None:
    """An engine may report its queue time with the end of the answer, or never."""
    script = [0.3, Output(text="a", token_ids=[1]), Output(finish=FinishReason.STOP, queue_seconds=told_last)]
    app = build_app(ScriptedEngine(script), load(env={}))
    body = PROMPT | {"return_timings": True}
    answered = request_app(app, "POST", COMPLETIONS, run=virtual_time.run, json=body)
    told_ms = None if told_last is None else 1000 * told_last
    assert answered.json()["choices"][0]["timings"]["queue_ms"] == told_ms
    found = samples(request_app(app, "GET", "/metrics").text)
    assert found["weft_request_queue_time_seconds_count"] == num_observed
    assert found["weft_request_prefill_time_seconds_count"] == num_observed
    assert found["weft_request_queue_time_seconds_sum"] == (told_last or 0.0)
    assert found["weft_time_to_first_token_seconds_count"] == found["weft_request_decode_time_seconds_count"] == 1


def test_the_lowest_buckets_are_fine_enough_for_small_models() -> None:
    found = samples(exposition([Metrics("m", ScriptedEngine())]).decode())
    for name, lowest in (
        ("inter_token_latency_seconds", "0.001"),
        ("time_to_first_token_seconds", "0.001"),
        ("request_queue_time_seconds", "0.001"),
        ("e2e_request_latency_seconds", "0.005"),
    ):
        assert f"vllm:{name}_bucket{{'le': '{lowest}'}}" in found
    # What vLLM's own dashboards ask for is there as well.
    for bound in ("0.01", "0.025", "0.05", "0.1", "1.0", "5.0"):
        assert f"vllm:inter_token_latency_seconds_bucket{{'le': '{bound}'}}" in found


def test_memory_is_told_by_its_kind() -> None:
    engine = ScriptedEngine()
    engine.memory = (3 << 20, 4 << 20)
    engine.model = replace(engine.model, memory=MemoryLedger(total=9 << 20, weights=2 << 20, kv=1 << 20))
    found = samples(exposition([Metrics("m", engine)]).decode())
    kinds = ("allocated", "reserved", "weights", "kv", "activations", "total")
    told = [found[f"weft_memory_bytes{{'kind': '{kind}'}}"] / 2**20 for kind in kinds]
    assert told == [3, 4, 2, 1, 0, 9]
