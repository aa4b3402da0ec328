"""The default model by Weft and by llama.cpp in turns on this machine's CPU: `make bench-cpu-peers`.

llama.cpp repacks weights of Q4_0 and Q8_0 when it loads them and is faster with those than with the Q4_1 of the default
model, so its own tool makes files of these from it: speed is measured here, and no text. The command prints tokens a
second, the median of --rounds, and ends with 1 where Weft is behind the best of llama.cpp's formats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from weft.hub.resolve import resolve

BATCHES = (1, 8, 32)
CONTEXT, STEPS, PROMPT = 128, 128, 512
LINES = (*(f"decode, batch {size}" for size in BATCHES), f"prompt of {PROMPT}")
FORMATS = ("Q4_0", "Q8_0")
Speeds = list[float]
"""Tokens a second, one for each of LINES."""


def weft(dtype: str, folder: Path) -> Speeds:
    file = folder / "weft.json"
    sizes = ",".join(map(str, BATCHES))
    _run(
        [
            sys.executable, "-m", "weft", "bench", "offline", "--engine", "native", "--device", "cpu",
            "--dtype", dtype, "--batch-sizes", sizes, "--prompt-lengths", str(PROMPT), "--requests", "1",
            "--runs", "1", "--json", str(file),
        ]
    )  # fmt: skip
    values = {figure["name"]: figure["value"] for figure in json.loads(file.read_text())["figures"]}
    decode = [values[f"decode, batch {size}"] for size in BATCHES]
    return [*decode, PROMPT / values[f"first token after {PROMPT}"] * 1000]


def llama(bench: Path, model: Path) -> Speeds:
    def measure(prompt: int, steps: int, batches: str) -> list[dict[str, float]]:
        context = (prompt + steps) * max(map(int, batches.split(",")))
        threads = str(len(os.sched_getaffinity(0)))
        printed = _run(
            [
                str(bench), "-m", str(model), "-c", str(context), "-b", "2048", "-ub", "512", "-t", threads,
                "-npp", str(prompt), "-ntg", str(steps), "-npl", batches, "--output-format", "jsonl",
            ]
        )  # fmt: skip
        return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]

    decode = measure(CONTEXT, STEPS, ",".join(map(str, BATCHES)))
    (prompt,) = measure(PROMPT, 1, "1")
    return [*(each["speed_tg"] for each in decode), prompt["speed_pp"]]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True, help="The folder of llama.cpp's commands.")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    console = Console()
    default = resolve("smollm2").path
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench = arguments.llama / "llama-batched-bench"
        peers: dict[str, Callable[[], Speeds]] = {
            "Weft": partial(weft, "auto", folder),
            "Weft, float32": partial(weft, "float32", folder),
            "llama.cpp, Q4_1": partial(llama, bench, default),
        }
        for kind in FORMATS:
            made = folder / f"{kind}.gguf"
            _run([str(arguments.llama / "llama-quantize"), "--allow-requantize", str(default), str(made), kind])
            peers[f"llama.cpp, {kind}"] = partial(llama, bench, made)
        rounds: dict[str, list[Speeds]] = {peer: [] for peer in peers}
        for turn in range(arguments.rounds):
            for peer, measure in peers.items():
                console.print(f"round {turn + 1} of {arguments.rounds}: {peer}")
                rounds[peer].append(measure())
    medians = {peer: [statistics.median(line) for line in zip(*runs, strict=True)] for peer, runs in rounds.items()}
    table = Table("tok/s", *peers, "Weft to the best of llama.cpp")
    behind = False
    for i, line in enumerate(LINES):
        ratio = medians["Weft"][i] / max(speeds[i] for peer, speeds in medians.items() if peer.startswith("llama"))
        behind |= ratio < 1
        table.add_row(line, *(f"{medians[peer][i]:,.0f}" for peer in peers), f"{ratio:.2f}")
    console.print(table)
    sys.exit(int(behind))


if __name__ == "__main__":
    main()
