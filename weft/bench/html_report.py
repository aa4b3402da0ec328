"""A report with plots in one HTML file, which needs nothing else: distributions of latencies, throughput over the load,
and how each run went second by second."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import msgspec
from msgspec import Struct

from weft.bench.compare import ComparedFigure
from weft.bench.serve import PointFigures, ServeReport

WIDTH, HEIGHT = 420, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 34
COLOURS = ("#2463eb", "#d9480f", "#2b8a3e", "#9c36b5", "#c92a2a", "#0b7285", "#5c940d", "#495057")

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1a1a1a }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .25rem .7rem; text-align: right }
th { border-bottom: 1px solid #999; font-weight: 600 } td:first-child, th:first-child { text-align: left }
.plots { display: flex; flex-wrap: wrap; gap: 1rem } figure { margin: 0 } figcaption { font-weight: 600 }
svg text { font: 11px system-ui, sans-serif; fill: #444 } .better { color: #2b8a3e } .worse { color: #c92a2a }
pre { background: #f4f4f4; padding: 1rem; overflow: auto } .key span { margin-right: 1rem }
@media (prefers-color-scheme: dark) { body { background: #161616; color: #e8e8e8 } svg text { fill: #bbb }
pre { background: #222 } }
"""


class Line(Struct, frozen=True):
    """A line of a plot."""

    name: str
    points: Sequence[tuple[float, float]]


def html_report(reports: Sequence[ServeReport], verdicts: Sequence[ComparedFigure] = ()) -> str:
    """Return the report of one measurement, or of two with what a comparison found."""
    title = " and ".join(f"{report.model} at {report.url}" for report in reports)
    parts = [f"<h1>{escape(title)}</h1>"]
    if verdicts:
        parts += ["<h2>Compared</h2>", _verdicts_table(verdicts)]
    for report in reports:
        parts += [f"<h2>{escape(report.model)} at {escape(report.url)}</h2>", _figures_table(report)]
    parts += ["<h2>Throughput over the load</h2>", f"<div class=plots>{_throughput(reports)}</div>"]
    for report in reports:
        parts.append(f"<h2>Latencies, {escape(report.url)}</h2>{_latencies(report)}")
        parts.append(f"<h2>Second by second, {escape(report.url)}</h2>{_timelines(report)}")
    facts = msgspec.json.format(msgspec.json.encode(reports[0].environment)).decode()
    parts.append(f"<h2>Environment</h2><pre>{escape(facts)}</pre>")
    head = f"<meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _figures_table(report: ServeReport) -> str:
    headings = (
        "load", "output tok/s", "total tok/s", "req/s", "good req/s", "first p50", "p90", "p99", "max",
        "between p50", "p90", "p99", "max", "end p50", "p90", "p99", "max", "errors",
    )  # fmt: skip
    rows = []
    for figures in report.figures:
        times = (figures.first_token_ms, figures.inter_token_ms, figures.e2e_ms)
        rates = (
            figures.output_tokens_per_s, figures.total_tokens_per_s, figures.requests_per_s, figures.goodput_per_s,
        )  # fmt: skip
        latencies = [value for each in times for value in (each.p50, each.p90, each.p99, each.max)]
        cells = [escape(figures.name), *map(_short, (*rates, *latencies)), str(figures.num_failures)]
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    return _table(headings, rows)


def _verdicts_table(verdicts: Sequence[ComparedFigure]) -> str:
    rows = []
    for each in verdicts:
        cells = (escape(each.point), escape(each.metric), _short(each.before), _short(each.after))
        interval = f"{each.ratio:.3f} [{each.low:.3f}, {each.high:.3f}]"
        shown = "".join(f"<td>{cell}</td>" for cell in (*cells, interval))
        rows.append(f"{shown}<td class={each.outcome}>{each.outcome}</td>")
    return _table(("load", "figure", "first", "second", "ratio, 95 %", ""), rows)


def _table(headings: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _throughput(reports: Sequence[ServeReport]) -> str:
    def over_load(report: ServeReport, is_open: bool) -> list[tuple[float, float]]:
        return sorted(
            (figures.point.load.rate if is_open else figures.point.load.connections, figures.output_tokens_per_s)
            for figures in report.figures
            if bool(figures.point.load.rate) is is_open
        )

    plots = ""
    for is_open, unit in ((False, "connections"), (True, "requests a second")):
        lines = [Line(report.url, points) for report in reports if (points := over_load(report, is_open))]
        if lines:
            plots += plot("Output tokens a second", unit, "tok/s", lines)
    return plots


def _latencies(report: ServeReport) -> str:
    kinds = (
        ("First token", [(figures.name, figures.first_token_ms.curve) for figures in report.figures]),
        ("Between tokens", [(figures.name, figures.inter_token_ms.curve) for figures in report.figures]),
        ("End to end", [(figures.name, figures.e2e_ms.curve) for figures in report.figures]),
    )
    plots = ""
    for title, curves in kinds:
        lines = [
            Line(name, [(value, 100 * number / (len(curve) - 1)) for number, value in enumerate(curve)])
            for name, curve in curves
            if len(curve) > 1
        ]
        if lines:
            plots += plot(title, "milliseconds", "% of all", lines)
    return f"<div class=plots>{plots}</div>{_key([figures.name for figures in report.figures])}"


def _timelines(report: ServeReport) -> str:
    plots = "".join(_timeline(figures) for figures in report.figures)
    return f"<div class=plots>{plots}</div>{_key(['events a second', 'open requests'])}"


def _timeline(figures: PointFigures) -> str:
    moments = figures.runs[0].timeline
    events = Line("events", [(second, moment.events) for second, moment in enumerate(moments)])
    num_open = Line("open", [(second, moment.open_requests) for second, moment in enumerate(moments)])
    return plot(figures.name, "seconds", "", [events, num_open])


def _key(names: Sequence[str]) -> str:
    spans = (f"<span style='color:{COLOURS[i % len(COLOURS)]}'>— {escape(name)}</span>" for i, name in enumerate(names))
    return f"<p class=key>{''.join(spans)}</p>"


def plot(title: str, x_name: str, y_name: str, lines: Sequence[Line]) -> str:
    """Return a figure with lines, and axes from 0 to their largest values."""
    most_x = max((x for line in lines for x, _ in line.points), default=0) or 1.0
    most_y = max((y for line in lines for _, y in line.points), default=0) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / most_x * (WIDTH - LEFT - RIGHT)
        return round(across, 1), round(HEIGHT - BOTTOM - y / most_y * (HEIGHT - TOP - BOTTOM), 1)

    drawn = ""
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, bottom = place(share * most_x, 0)
        left, y = place(0, share * most_y)
        drawn += f"<line x1={left} x2={WIDTH - RIGHT} y1={y} y2={y} stroke=#8884 />"
        drawn += f"<text x={left - 6} y={y + 4} text-anchor=end>{_short(share * most_y)}</text>"
        drawn += f"<text x={x} y={bottom + 15} text-anchor=middle>{_short(share * most_x)}</text>"
    drawn += f"<text x={WIDTH - RIGHT} y={HEIGHT - 4} text-anchor=end>{escape(x_name)}</text>"
    drawn += f"<text x={LEFT} y={HEIGHT - 4}>{escape(y_name)}</text>"
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        places = [place(x, y) for x, y in line.points]
        path = " ".join(f"{x},{y}" for x, y in places)
        drawn += f'<polyline points="{path}" fill=none stroke={colour} stroke-width=1.8 />'
        if len(places) <= 12:
            drawn += "".join(f"<circle cx={x} cy={y} r=2.6 fill={colour} />" for x, y in places)
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width={WIDTH} height={HEIGHT} role=img>{drawn}</svg>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" if value >= 10 else f"{value:.3g}"
