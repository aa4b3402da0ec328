"""A plan for a reader."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from weft.hub.memory import GIB
from weft.hub.planning import Plan

LOG_WIDTH = 100


def plan_table(plan: Plan) -> RenderableType:
    """The memory as a table, and below it what fits."""
    ledger, room = plan.ledger, plan.room
    table = Table(box=None, pad_edge=False, title=_title(plan), title_justify="left", title_style="bold")
    table.add_column("memory")
    table.add_column("GiB", justify="right")
    table.add_column("share", justify="right")
    table.add_column("how it is known")
    for name, size, source in (
        ("weights", ledger.weights, f"by the files, held as {plan.dtype}"),
        ("KV cache", ledger.kv, _cache_source(plan)),
        ("activations", ledger.activations, f"estimated: {plan.max_num_batched_tokens} tokens a step"),
        ("graphs", ledger.graphs, f"estimated: {plan.max_num_seqs} requests at a time"),
        ("libraries", room.libraries, "estimated"),
        ("others", ledger.others - room.libraries, "in use now"),
        ("spare", ledger.spare, _spare_source(plan)),
        ("total", ledger.total, "free now" if room.share == 1.0 else "of the device"),
    ):
        share = f"{size / ledger.total:.1%}" if ledger.total else "?"
        table.add_row(name, f"{size / GIB:.2f}", share, source)
    return Group(table, *(Text(line) for line in _verdict(plan)))


def plan_lines(plan: Plan) -> list[str]:
    """The same for a log."""
    console = Console(file=io.StringIO(), width=LOG_WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(plan_table(plan))
    return [line.rstrip() for line in captured.get().splitlines() if line.strip()]


def _title(plan: Plan) -> str:
    return f"{plan.model} by {plan.engine} on {plan.device}"


def _cache_source(plan: Plan) -> str:
    if not plan.num_blocks:
        return "not known" if plan.problem is None else "does not fit"
    return f"{plan.kv_per_token / 1024:.1f} KiB a token, {plan.num_blocks} blocks"


def _spare_source(plan: Plan) -> str:
    return "" if plan.room.share == 1.0 else f"--gpu-memory-utilization is {plan.room.share:g}"


def _verdict(plan: Plan) -> list[str]:
    lines = []
    if plan.kv_per_token:
        lines.append(f"largest context of one request: {plan.largest_context} tokens")
        if plan.num_blocks:
            lines.append(f"requests of {plan.max_model_len} tokens side by side: {plan.largest_batch}")
    if plan.problem is not None:
        return [*lines, f"does not fit: {plan.problem}"]
    return [*lines, plan.warning or f"fits, with a context of {plan.max_model_len} tokens"]
