"""What was counted, as the Health method tells it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from weft.observe.metrics import Metrics
from weft.types import FinishReason

_FAILED = (FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.REJECTED)


def figures(models: Sequence[Metrics]) -> dict[str, str]:
    """The same figures as /metrics, as text, of all models together; none until one is there to be measured."""
    if not models:
        return {}
    samples = [sample for metrics in models for family in metrics.collect() for sample in family.samples]
    value: defaultdict[str, float] = defaultdict(float)
    ended: defaultdict[str, float] = defaultdict(float)
    for sample in samples:
        value[sample.name] += sample.value
        if sample.name == "weft_request_success_total":
            ended[sample.labels["finished_reason"]] += sample.value
    running, waiting = value["weft_num_requests_running"], value["weft_num_requests_waiting"]
    told = {
        "requests_inflight": running + waiting,
        "requests_running": running,
        "requests_waiting": waiting,
        "requests_success": ended[FinishReason.STOP] + ended[FinishReason.LENGTH],
        "requests_failed": sum(ended[reason] for reason in _FAILED),
        "requests_aborted": ended[FinishReason.ABORT],
        "requests_rejected": value["weft_num_requests_rejected_total"],
        "prompt_tokens": value["weft_prompt_tokens_total"],
        "generation_tokens": value["weft_generation_tokens_total"],
        "kv_cache_usage": max(sample.value for sample in samples if sample.name == "weft_kv_cache_usage_perc"),
        "engine_restarts": value["weft_engine_restarts_total"],
    }
    return {name: f"{figure:.15g}" for name, figure in told.items()}
