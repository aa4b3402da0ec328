"""Every query of the dashboard names metrics and labels that /metrics has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from tests.api.http import COMPLETIONS, PROMPT, request_app
from tests.api.scripted_engine import ScriptedEngine, answer
from weft.api.app import build_app
from weft.config import load
from weft.engine_stats import EngineStats, ReplicaStats

FOLDER = Path(__file__).parents[2] / "docs" / "grafana"
DASHBOARD = json.loads((FOLDER / "weft.json").read_text())
CLUSTER = json.loads((FOLDER / "cluster.json").read_text())

WORD = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
NOT_METRICS = {"sum", "max", "min", "by", "rate", "increase", "histogram_quantile", "label_values"}


def panels(dashboard: dict[str, Any] = DASHBOARD) -> Iterator[dict[str, Any]]:
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", [])


def queries(dashboard: dict[str, Any] = DASHBOARD) -> list[str]:
    shown = [target["expr"] for panel in panels(dashboard) for target in panel.get("targets", [])]
    return shown + [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]


def asked_for(query: str) -> tuple[set[str], set[str]]:
    """Return the metrics and the labels that a query names."""
    labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", query))
    labels |= {name.strip() for names in re.findall(r"by \(([^)]*)\)", query) for name in names.split(",")}
    labels |= set(re.findall(r"label_values\(\w+, (\w+)\)", query))
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)", " ", query)
    metrics = {word for word in WORD.findall(bare) if not word.isdigit()} - NOT_METRICS - labels
    return metrics, labels


class OfReplicas(ScriptedEngine):
    """A scripted engine that says it has replicas."""

    def stats(self) -> EngineStats:
        busy = ReplicaStats(state="ready", running=2, waiting=1, kv_usage=0.25, restarts=5)
        replicas = {"a": busy, "b": ReplicaStats(state="draining")}
        return replace(super().stats(), moved_requests=3, replicas=replicas)


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Return every sample's labels by its name, after a request was served."""
    app = build_app(OfReplicas(answer("ab", "c")), load(env={}))
    assert request_app(app, "POST", COMPLETIONS, json=PROMPT).status_code == 200
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(request_app(app, "GET", "/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("query", [*queries(), *queries(CLUSTER)])
def test_a_query_resolves(query: str, exposed: dict[str, set[str]]) -> None:
    metrics, labels = asked_for(query)
    assert metrics and metrics <= exposed.keys(), metrics - exposed.keys()
    for metric in metrics:
        assert labels - {"instance"} <= exposed[metric], (metric, labels - exposed[metric])


def test_replicas_are_told_apart_by_a_label() -> None:
    app = build_app(OfReplicas(answer("ab")), load({"served_model_name": "mine"}, env={}))
    text = request_app(app, "GET", "/metrics").text
    assert 'weft_replica_ready{model_name="mine",replica="a"} 1.0' in text
    assert 'weft_replica_ready{model_name="mine",replica="b"} 0.0' in text
    assert 'weft_replica_kv_cache_usage_perc{model_name="mine",replica="a"} 0.25' in text
    assert 'weft_replica_engine_restarts{model_name="mine",replica="a"} 5.0' in text
    assert 'weft_requests_moved_total{model_name="mine"} 3.0' in text


def test_a_server_without_replicas_tells_of_none() -> None:
    app = build_app(ScriptedEngine(answer("ab")), load(env={}))
    assert "weft_replica_ready{" not in request_app(app, "GET", "/metrics").text


def test_the_reader_of_queries_reads_them() -> None:
    query = 'histogram_quantile(0.9, sum by (le, x) (rate(a_bucket{m=~"$model"}[$__rate_interval]))) / sum(b:c{y="1"})'
    assert asked_for(query) == ({"a_bucket", "b:c"}, {"le", "x", "m", "y"})


def test_what_a_dashboard_must_show_is_shown() -> None:
    asked = set().union(*(asked_for(query)[0] for query in queries()))
    for metric in ("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket", "num_requests_waiting"):
        assert f"weft_{metric}" in asked
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids)) and len(queries()) > 20


def test_the_same_dashboard_serves_with_the_names_of_others(exposed: dict[str, set[str]]) -> None:
    """Dashboards made for vLLM's names work with Weft's aliases."""
    alone = {"weft_prepared", "weft_engine_restarts_total", "weft_num_requests_rejected_total"}
    for metric in set().union(*(asked_for(query)[0] for query in queries())) - alone:
        assert metric.replace("weft_", "vllm:", 1) in exposed
