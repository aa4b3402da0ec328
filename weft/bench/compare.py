"""Compares two measurements: the ratio of each figure with its confidence interval, and whether the second is better,
the same or worse."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from weft.bench.generator import Run
from weft.bench.serve import ServeReport
from weft.errors import ConfigError

Outcome = Literal["better", "same", "worse", "unknown"]

STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""The quantiles of Student's distribution within which 95 % lie, for 1, 2, … degrees of freedom."""
NORMAL = 1.960


class Metric(Struct, frozen=True):
    name: str
    of: Callable[[Run], float]
    more_is_better: bool = False


METRICS = (
    Metric("output tok/s", lambda run: run.output_tokens_per_s, more_is_better=True),
    Metric("goodput, req/s", lambda run: run.goodput_per_s, more_is_better=True),
    Metric("first token p50, ms", lambda run: run.first_token_ms.p50),
    Metric("first token p99, ms", lambda run: run.first_token_ms.p99),
    Metric("between tokens p50, ms", lambda run: run.inter_token_ms.p50),
    Metric("between tokens p99, ms", lambda run: run.inter_token_ms.p99),
    Metric("end to end p50, ms", lambda run: run.e2e_ms.p50),
)


class ComparedFigure(Struct, frozen=True, kw_only=True):
    """One figure of one point: the second measurement over the first."""

    point: str
    metric: str
    before: float
    after: float
    """Geometric means of the runs."""
    ratio: float
    low: float
    high: float
    """The 95 % confidence interval of the ratio; equal to it where one run alone was made."""
    outcome: Outcome


def compare(
    before: ServeReport, after: ServeReport, *, in_turns: bool, tolerance: float = 0.02
) -> list[ComparedFigure]:
    """Compare the points that both reports have. `in_turns`: runs of the same number were made one behind the other,
    so that what slowed one down slowed the other. A difference within the tolerance is none."""
    others = {figures.name: figures.runs for figures in after.figures}
    verdicts = [
        _verdict(figures.name, metric, figures.runs, others[figures.name], in_turns=in_turns, tolerance=tolerance)
        for figures in before.figures
        if figures.name in others
        for metric in METRICS
    ]
    if not verdicts:
        raise ConfigError(
            "The two reports have no load in common.",
            hint=f"The first has {', '.join(f.name for f in before.figures)}; the second {', '.join(others)}.",
        )
    return [verdict for verdict in verdicts if verdict is not None]


def _verdict(
    point: str, metric: Metric, before: Sequence[Run], after: Sequence[Run], *, in_turns: bool, tolerance: float
) -> ComparedFigure | None:
    """Return None for a figure that one of them does not have, as images have no first token."""
    ours, theirs = [metric.of(run) for run in before], [metric.of(run) for run in after]
    if min(*ours, *theirs, 1.0) <= 0:
        return None
    first, second = [math.log(value) for value in ours], [math.log(value) for value in theirs]
    difference = statistics.fmean(second) - statistics.fmean(first)
    half = _half_width(first, second, in_turns=in_turns)
    low, high = (math.exp(difference - (half or 0.0)), math.exp(difference + (half or 0.0)))
    ratio = math.exp(difference)
    return ComparedFigure(
        point=point,
        metric=metric.name,
        before=math.exp(statistics.fmean(first)),
        after=math.exp(statistics.fmean(second)),
        ratio=ratio,
        low=low,
        high=high,
        outcome=_outcome(ratio, low, high, half is None, tolerance, more_is_better=metric.more_is_better),
    )


def _half_width(first: list[float], second: list[float], *, in_turns: bool) -> float | None:
    """Return half of the interval of the difference of two means; None where there are too few runs for one."""
    if min(len(first), len(second)) < 2:
        return None
    if in_turns and len(first) == len(second):
        differences = [theirs - ours for ours, theirs in zip(first, second, strict=True)]
        return _student_t(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    errors = [statistics.variance(values) / len(values) for values in (first, second)]
    if not sum(errors):
        return 0.0
    # Welch's degrees of freedom.
    freedom = sum(errors) ** 2 / sum(
        error**2 / (len(values) - 1) for error, values in zip(errors, (first, second), strict=True)
    )
    return _student_t(int(freedom)) * math.sqrt(sum(errors))


def _student_t(freedom: int) -> float:
    return STUDENT_T[max(1, freedom) - 1] if freedom <= len(STUDENT_T) else NORMAL


def _outcome(
    ratio: float, low: float, high: float, is_unknown: bool, tolerance: float, *, more_is_better: bool
) -> Outcome:
    if is_unknown:
        return "unknown"
    if low <= 1 <= high or abs(ratio - 1) <= tolerance:
        return "same"
    return "better" if (ratio > 1) == more_is_better else "worse"


def judged_worse(verdicts: Sequence[ComparedFigure]) -> bool:
    return any(verdict.outcome == "worse" for verdict in verdicts)


def read_report(file: Path) -> ServeReport:
    """Read what `weft bench serve --json` wrote. Raises ConfigError."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ServeReport)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{file} is not a report of weft bench serve: {error}.") from error
