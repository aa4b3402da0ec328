"""The live view of a server as text, for `weft top` and `weft ps`."""

from __future__ import annotations

import os
import select
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weft.errors import Unavailable
from weft.serving.live import CacheBlocks, LatencyFigures, LiveModel, Snapshot, SpentBudget
from weft.serving.timing import PhaseName, Timeline

RETRY_S = 1.0
SHOWN_REQUESTS = 12
SPARKS = "▁▂▃▄▅▆▇█"
COLOURS: dict[PhaseName, str] = {
    "wait": "bright_black",
    "queue": "white",
    "prefill": "yellow",
    "encode": "magenta",
    "decode": "cyan",
    "denoise": "blue",
    "tool": "green",
}

LETTERS: dict[PhaseName, str] = {
    "wait": "w", "queue": "q", "prefill": "p", "encode": "e", "decode": "d", "denoise": "n", "tool": "t"
}  # fmt: skip
"""They stand for the phases where there are no colours."""

OpenStream = Callable[[], AbstractContextManager[Iterator[Snapshot]]]


class History:
    """The history holds what the plots and the list of requests show of earlier snapshots."""

    def __init__(self) -> None:
        self.speeds: dict[str, deque[float]] = {}
        self.ended: deque[Timeline] = deque(maxlen=SHOWN_REQUESTS)

    def add(self, snapshot: Snapshot) -> None:
        known = {(one.id, one.began) for one in self.ended}
        self.ended.extend(one for one in snapshot.ended if (one.id, one.began) not in known)
        for model in snapshot.models:
            if model.throughput is not None:
                past = self.speeds.setdefault(model.name, deque(maxlen=60))
                past.append(model.throughput.output_tokens_per_s)


def watch(open_stream: OpenStream, console: Console, keyboard: TextIO) -> None:
    """Show every snapshot in the place of the last one, until q is pressed."""
    history = History()
    with _keys(keyboard) as quits, Live(Text("Waiting for the server."), console=console, screen=True) as live:
        while True:
            try:
                with open_stream() as snapshots:
                    for snapshot in snapshots:
                        history.add(snapshot)
                        live.update(_view(snapshot, history, console), refresh=True)
                        if quits(0.0):
                            return
            except Unavailable as error:
                said = f"{_plain(error.message)} {_plain(error.hint)}\n\nIt is tried again; q ends."
                live.update(Text(said, "red"), refresh=True)
            if quits(RETRY_S):
                return


@contextmanager
def _keys(keyboard: TextIO) -> Iterator[Callable[[float], bool]]:
    """Read single keys, and yield what tells whether q was pressed within so many seconds."""
    if not keyboard.isatty():

        def never(seconds: float) -> bool:
            time.sleep(seconds)
            return False

        yield never
        return

    def quits(seconds: float) -> bool:
        readable, _, _ = select.select([keyboard], [], [], seconds)
        # Not by the file itself, which would keep what it has read beyond the first key.
        pressed = os.read(keyboard.fileno(), 64) if readable else b" "
        return not pressed or b"q" in pressed.lower()

    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard)
        yield quits
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def snapshot_text(snapshot: Snapshot, console: Console) -> RenderableType:
    """Return one snapshot as text."""
    return _view(snapshot, History(), console)


def _bar(name: PhaseName, length: int, console: Console) -> tuple[str, str]:
    has_colours = console.is_terminal and not console.no_color
    return ("█" if has_colours else LETTERS[name]) * length, COLOURS[name]


MIN_WIDTH_OF_ENGINES = 64


def models_table(models: list[LiveModel], width: int = 80) -> Table:
    """Return a line for each model; a narrow terminal is not told of the engines."""
    table = Table("name", "state", box=None, pad_edge=False)
    is_wide = width >= MIN_WIDTH_OF_ENGINES
    for name in ("engine", "device") if is_wide else ():
        table.add_column(name)
    for name in ("memory", "running", "waiting", *(["restarts"] if is_wide else [])):
        table.add_column(name, justify="right")
    for model in models:
        state = _plain(f"{model.state} {model.stage}".strip())
        engine = (_plain(model.engine), _plain(model.device) or "-") if is_wide else ()
        counts = [str(count) for count in (model.running, model.waiting, model.restarts)]
        cells = (_plain(model.name), state, *engine, _size(model.memory_bytes), *counts)
        table.add_row(*cells[: len(table.columns)])
    return table


def _view(snapshot: Snapshot, history: History, console: Console) -> RenderableType:
    parts: list[RenderableType] = []
    for model in snapshot.models:
        parts += [*_model_lines(model, snapshot.tick_s, history, console), Text()]
    ended = history.ended or snapshot.ended[-SHOWN_REQUESTS:]
    requests = [*snapshot.open, *reversed(ended)][:SHOWN_REQUESTS]
    if requests:
        parts.append(_requests(requests, console))
    return Group(*parts)


def _model_lines(model: LiveModel, tick_s: float, history: History, console: Console) -> Iterator[RenderableType]:
    where = " on ".join(filter(None, (model.engine, model.device)))
    title = Text(_plain(model.name), "bold")
    title.append(
        f"  {_plain(model.state)}  {_plain(where)}  {_size(model.memory_bytes)}  restarts {model.restarts}", "none"
    )
    yield title
    line = f"running {model.running}  waiting {model.waiting}  preemptions {model.preemptions}"
    if (speed := model.throughput) is not None:
        line += f"  output {speed.output_tokens_per_s:.1f} tok/s  prompts {speed.prompt_tokens_per_s:.1f} tok/s"
        if speed.denoise_steps_per_s or speed.images_per_s:
            line += f"  images {speed.images_per_s:.2f}/s, {speed.denoise_steps_per_s:.1f} steps/s"
    yield Text(line)
    yield Text(f"TTFT {_latency(model.ttft)}  between tokens {_latency(model.inter_token)}")
    room = max(20, min(console.width, 100) - 18)
    if model.spent is not None and tick_s:
        yield _budget(model.spent, tick_s, room, console)
    if model.blocks is not None:
        yield _cache(model.blocks, room)
    if past := history.speeds.get(model.name):
        most = max(past) or 1.0
        bars = "".join(SPARKS[min(7, int(8 * value / most))] for value in past)
        yield Text.assemble("tok/s         ", (bars, COLOURS["decode"]), f" {most:.0f} at most")
    if model.not_told:
        yield Text(_plain(model.not_told), "dim")


def _budget(spent: SpentBudget, tick_s: float, room: int, console: Console) -> Text:
    kinds: dict[PhaseName, int] = {
        "decode": spent.decode, "prefill": spent.prefill, "denoise": spent.denoise, "encode": spent.encode
    }  # fmt: skip
    total = sum(kinds.values())
    text = Text("step budget   ")
    for kind, count in kinds.items():
        text.append(*_bar(kind, round(room * count / total) if total else 0, console))
    if not total:
        text.append("·" * room, "dim")
    shares = "  ".join(f"{kind} {count / tick_s:.0f}" for kind, count in kinds.items() if count)
    return text.append(f"\n              {spent.steps / tick_s:.1f} steps/s  {shares + ' tok/s' if shares else 'idle'}")


def _cache(blocks: CacheBlocks, room: int) -> Text:
    """Draw the blocks in one line: in use, cached, free."""
    text = Text("KV cache      ")
    if blocks.used_cells and blocks.cached_cells:
        size = max(1, -(-len(blocks.used_cells) // room))
        for at in range(0, len(blocks.used_cells), size):
            used, cached = (_share(cells[at : at + size]) for cells in (blocks.used_cells, blocks.cached_cells))
            if not used and not cached:
                text.append("·", "dim")
            else:
                text.append("█" if used + cached > 0.5 else "▄", COLOURS["decode" if used >= cached else "prefill"])
    else:
        used_width = round(room * blocks.used / max(1, blocks.total))
        text.append("█" * used_width, COLOURS["decode"]).append("·" * (room - used_width), "dim")
    cached_too = "" if blocks.cached is None else f"  cached {blocks.cached}"
    percent = 100 * blocks.used / max(1, blocks.total)
    return text.append(f"\n              {percent:.1f} %  in use {blocks.used}{cached_too}  of {blocks.total} blocks")


def _share(cells: str) -> float:
    return sum(int(cell, 16) for cell in cells) / (15 * len(cells))


def _requests(requests: list[Timeline], console: Console) -> Table:
    table = Table("request", "state", "work", box=None, pad_edge=False)
    table.add_column("seconds", justify="right")
    key = Text("timeline: ")
    for name in LETTERS:
        key.append(*_bar(name, 1, console)).append(f" {name}  ")
    table.add_column(key)
    longest = max(_seconds(one) for one in requests) or 1.0
    for one in requests:
        bar = Text()
        for name, seconds in one.phases:
            length = max(1 if seconds > 0.01 * longest else 0, round(30 * seconds / longest))
            bar.append(*_bar(name, length, console))
        work = f"{one.steps[0]}/{one.steps[1]} steps" if one.steps else f"{one.prompt_tokens} → {one.tokens} tok"
        state = "running" if one.state == "open" else one.state
        table.add_row(_plain(one.id)[:8], _plain(state), work, f"{_seconds(one):.2f}", bar)
    return table


def _seconds(one: Timeline) -> float:
    return sum(seconds for _, seconds in one.phases)


def _latency(figures: LatencyFigures | None) -> str:
    if figures is None:
        return "-"
    return f"p50 {1000 * figures.p50_s:.0f} ms, p95 {1000 * figures.p95_s:.0f} ms"


def _size(num_bytes: int) -> str:
    if not num_bytes:
        return "-"
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _plain(text: str) -> str:
    """Return a text of the server without what would steer the terminal."""
    return "".join(one if one.isprintable() else "�" for one in text)
