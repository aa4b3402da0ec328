"""What dies × what a client is doing: `python -m tests.cluster.kill_matrix [--ray] [--rows rank,raylet]`.

For every cell two requests of a client are under way when the thing dies, and one more is sent then. Their answers are
compared with those of a server with an engine of its own. The table says what clients saw; tokens (or numbers, images,
vectors, lines) lost and repeated; requests that moved and engines that were replaced; the seconds from the death to the
next byte, and the longest time after it in which nothing came. Some answers come whole: there the seconds are those of
all that is left of the work, and the row where nothing dies tells how much that is. A cell in which nothing was hit is
tried again.

An edge's own streams end with it: there the client sends its request again, to the other edge.

Rows on Ray (--ray) need Ray, root and network namespaces: a head with the edge, and two nodes, each like a machine of
its own (ray_stage.py). There an operator also drains a replica and restarts all, while all five clients ask on and on.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from tests.cluster.matrix_clients import CLIENTS, Refused
from tests.cluster.stages import Effect, HandStage, Setting, Stage
from tests.e2e.server import Server
from tests.waiting import PATIENCE, wait_until

NOTHING = "nothing"
HAND_ROWS = (
    NOTHING, "engine killed", "engine stopped", "replica killed", "replica stopped", "network reset", "network silent",
    "edge killed",
)  # fmt: skip
RANK_ROWS = ("rank killed", "rank stopped")
RAY_ROWS = (
    "Ray: nothing", "Ray: replica killed", "Ray: actor killed", "Ray: controller killed", "Ray: raylet killed",
    "Ray: node killed", "Ray: network cut", "Ray: head killed", "Ray: drain", "Ray: rolling restart",
)  # fmt: skip
STREAMED = ("chat stream", "tools", "image")
ITS_ANSWER = "its answer"
TRIES = 3
LOG_LINES = 60
Answers = dict[str, list[str]]


class Outcome(Struct, frozen=True):
    """What the clients of one cell saw."""

    saw: str
    lost: int
    repeated: int
    moved: int
    """Requests that moved, and engines that were replaced."""
    next_s: float
    """Seconds from the death to the next byte."""
    pause_s: float
    """The longest time in which nothing came, from the death on."""
    later: str
    """What a request saw that was sent after the death."""

    @property
    def is_right(self) -> bool:
        said = self.saw.endswith((ITS_ANSWER, "asked again", "answers"))
        return said and not self.lost and not self.repeated and self.later in (ITS_ANSWER, "")


class Asking(threading.Thread):
    """A client's request, in a thread; where its connection breaks and there is another edge, asked again there."""

    def __init__(self, client: str, url: str, other_url: str = "") -> None:
        super().__init__(daemon=True)
        self._client = CLIENTS[client]
        self._urls = [url, other_url] if other_url else [url]
        self.began = time.monotonic()
        self.at: list[float] = []
        self.pieces: list[str] = []
        self.saw = ""
        self.start()

    def run(self) -> None:
        for url in self._urls:
            try:
                self.pieces = self._client(url, lambda: self.at.append(time.monotonic()))
            except (httpx.HTTPError, Refused, AssertionError, TimeoutError, ValueError, KeyError) as error:
                self.saw = f"FAILED: {type(error).__name__} {error}"[:200]
                continue
            self.saw = "a broken connection; asked again" if self.saw else ITS_ANSWER
            return

    def ended(self) -> Asking:
        self.join(PATIENCE)
        self.saw = self.saw or "FAILED: no end"
        return self

    def seconds(self, since: float) -> tuple[float, float]:
        """Return the time to the next byte, and the longest in which none came."""
        after = [at for at in self.at if at > since]
        times = [since, *after]
        gaps = [late - early for early, late in itertools.pairwise(times)]
        return (gaps[0], max(gaps)) if gaps else (0.0, 0.0)


def compared(saw: str, pieces: Sequence[str], expected: Sequence[str]) -> tuple[str, int, int]:
    """Return what a client saw, and how many pieces were lost and repeated."""
    if list(pieces) == list(expected):
        return saw, 0, 0
    got, wanted = Counter(pieces), Counter(expected)
    return saw if saw.startswith("FAILED") else "ANOTHER ANSWER", (wanted - got).total(), (got - wanted).total()


def run_cells(stage: Stage, row: str, expected: Answers) -> dict[str, Outcome]:
    """Let something die while requests of these clients are under way, and return what each saw."""
    death = stage.deaths.get(row)
    others = stage.edges[1:] if death is not None and death.effect == "breaks" else []
    before = _traces(stage.edges[0])
    urls = [edge.url for edge in (stage.edges[0], *others)]
    asking = {client: [Asking(client, *urls) for _ in range(2)] for client in expected}

    def are_under_way() -> bool:
        both = [one for client in asking for one in asking[client] if client in STREAMED]
        began = all(len(one.at) > 4 or not one.is_alive() for one in both)
        return began and (any(stage.running().values()) or not _any_alive(asking))

    wait_until(are_under_way, "requests under way")
    at = time.monotonic()
    if death is not None:
        death.kill()
    later = {client: Asking(client, urls[-1]) for client in expected}
    for one in (*itertools.chain(*asking.values()), *later.values()):
        one.ended()
    after = _traces(stage.edges[0]) if not others else {}
    moved = int(sum(after[name] - before[name] for name in after))
    return {client: _outcome(asking[client], later[client], expected[client], at, moved) for client in expected}


def _any_alive(asking: dict[str, list[Asking]]) -> bool:
    return any(one.is_alive() for one in itertools.chain(*asking.values()))


def _outcome(asking: Sequence[Asking], later: Asking, expected: Sequence[str], at: float, moved: int) -> Outcome:
    seen = [compared(one.saw, one.pieces, expected) for one in asking]
    saw, _, _ = max(seen, key=lambda one: (one[0] != ITS_ANSWER, one[1], one[2]))
    timed = [one.seconds(at) for one in asking]
    return Outcome(
        saw=saw,
        lost=sum(lost for _, lost, _ in seen),
        repeated=sum(repeated for _, _, repeated in seen),
        moved=moved,
        next_s=max(next_s for next_s, _ in timed),
        pause_s=max(pause_s for _, pause_s in timed),
        later=compared(later.saw, later.pieces, expected)[0],
    )


def _traces(edge: Server) -> dict[str, float]:
    return {name: edge.metric(name) for name in ("weft_requests_moved_total", "weft_engine_restarts_total")}


def has_hit(effect: Effect, outcome: Outcome) -> bool:
    """Return whether what died had something to do."""
    if effect == "breaks":
        return outcome.saw != ITS_ANSWER
    return effect == "none" or outcome.moved > 0


def run_operation(stage: Stage, row: str, expected: Answers) -> dict[str, Outcome]:
    """Let an operator do something while all clients ask without a pause, and return what each saw."""
    done = threading.Event()
    before = _traces(stage.edges[0])
    asked: dict[str, list[Asking]] = {client: [] for client in expected}

    def ask_on(client: str) -> None:
        while not done.is_set():
            asked[client].append(Asking(client, stage.edges[0].url).ended())

    threads = [threading.Thread(target=ask_on, args=(client,)) for client in expected]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: any(stage.running().values()), "requests under way")
        stage.operations[row]()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    after = _traces(stage.edges[0])
    moved = int(sum(after[name] - before[name] for name in after))
    outcomes = {}
    for client, all_asked in asked.items():
        seen = [compared(one.saw, one.pieces, expected[client]) for one in all_asked]
        wrong = [saw for saw, _, _ in seen if saw != ITS_ANSWER]
        pauses = [one.seconds(one.began)[1] for one in all_asked]
        outcomes[client] = Outcome(
            saw=wrong[0] if wrong else f"{len(seen)} answers",
            lost=sum(lost for _, lost, _ in seen),
            repeated=sum(repeated for _, _, repeated in seen),
            moved=moved,
            next_s=0.0,
            pause_s=max(pauses, default=0.0),
            later="",
        )
    return outcomes


def run(
    cells: Mapping[str, Sequence[str]], folder: Path, say: Callable[[str], None] = lambda text: None
) -> dict[tuple[str, str], Outcome]:
    """Run cells: rows, and the clients of each."""
    outcomes = {}
    asked = [client for client in CLIENTS if any(client in clients for clients in cells.values())]
    with Setting(folder, has_images="image" in asked) as setting:
        expected = {client: CLIENTS[client](setting.single.url, lambda: None) for client in asked}
        say("a single server has answered")
        for stage_rows, make in _stages(setting):
            wanted = {row: {client: expected[client] for client in cells[row]} for row in stage_rows if row in cells}
            if not wanted:
                continue
            with make() as stage:
                say(f"{type(stage).__name__} is ready")
                for row, client, outcome in _run_rows(stage, wanted):
                    outcomes[row, client] = outcome
                    say(f"{row}, {client}: {outcome}")
                    if not outcome.is_right:
                        say("the edge's log: " + "".join(stage.edges[0].log[-LOG_LINES:]))
    return outcomes


def _stages(setting: Setting) -> Iterator[tuple[Sequence[str], Callable[[], Stage]]]:
    yield HAND_ROWS, lambda: HandStage(setting)
    yield RANK_ROWS, lambda: HandStage(setting, num_ranks=2)

    def on_ray() -> Stage:
        from tests.cluster.ray_stage import RayStage

        return RayStage(setting)

    yield RAY_ROWS, on_ray


def _run_rows(stage: Stage, rows: Mapping[str, Answers]) -> Iterator[tuple[str, str, Outcome]]:
    is_whole = True
    for row, expected in rows.items():
        if row in stage.operations:
            if not is_whole:
                stage.mend()
            is_whole = True
            for client, outcome in run_operation(stage, row, expected).items():
                yield row, client, outcome
            continue
        effect = stage.deaths[row].effect if row in stage.deaths else "none"
        each = [{client: answer} for client, answer in expected.items()]
        # What does not touch requests takes a while to mend, and dies once under all clients.
        for clients in [expected] if row in stage.deaths and effect == "none" else each:
            for _ in range(TRIES):
                if not is_whole:
                    stage.mend()
                outcomes = run_cells(stage, row, clients)
                is_whole = row not in stage.deaths
                if all(has_hit(effect, one) or not one.is_right for one in outcomes.values()):
                    break
            for client, outcome in outcomes.items():
                yield row, client, outcome


def main() -> None:
    every = (*HAND_ROWS, *RANK_ROWS, *RAY_ROWS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", action="store_true", help="also the rows on a Ray cluster")
    parser.add_argument("--rows", default="", help=f"only those that contain one of these words: {', '.join(every)}")
    parser.add_argument("--clients", default="", help=f"only those that contain one: {', '.join(CLIENTS)}")
    asked = parser.parse_args()
    rows = _named(asked.rows, every if asked.ray or asked.rows else (*HAND_ROWS, *RANK_ROWS))
    # What was made is removed however this ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        clients = _named(asked.clients, tuple(CLIENTS))
        outcomes = run(dict.fromkeys(rows, clients), Path(folder), say)
    _print(outcomes)
    sys.exit(not all(one.is_right for one in outcomes.values()))


def _named(words: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if not words or any(word.strip() in name for word in words.split(","))]


def _print(outcomes: dict[tuple[str, str], Outcome]) -> None:
    titles = ("what died", "client", "what it saw", "lost", "repeated", "moved or replaced", "next byte, s", "pause, s")
    table = Table(*titles, "a request after it")
    for (row, client), one in outcomes.items():
        counts = map(str, (one.lost, one.repeated, one.moved))
        table.add_row(row, client, one.saw, *counts, f"{one.next_s:.1f}", f"{one.pause_s:.1f}", one.later)
    Console(width=170).print(table)
    rows = {row: [one for (name, _), one in outcomes.items() if name == row] for row, _ in outcomes}
    clients = list(dict.fromkeys(client for _, client in outcomes))
    print("\nAs Markdown: the longest pause in seconds, where nothing was lost and nothing repeated.\n")
    print(f"| what dies | {' | '.join(clients)} |\n|---|{'---|' * len(clients)}")
    for row, seen in rows.items():
        print(f"| {row} | {' | '.join(f'{one.pause_s:.1f}' if one.is_right else 'WRONG' for one in seen)} |")


if __name__ == "__main__":
    main()
