"""One server measured by three clients in turns: `make show-agreement`.

`weft bench serve`, `vllm bench serve` and guidellm put the same load on the same server: a closed loop of a few
connections, prompts of 64 random tokens, answers of 32. The command prints tokens a second and the median time to the
first token of each, and ends with 1 where one of them differs from Weft's by more than --tolerance.

vLLM and guidellm are large, so each lives in a virtual environment of its own, whose Pythons are the arguments. The
server and the clients have a core each where there are two.
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
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from tests.e2e.server import Server
from tests.peers.vllm_bench import BENCH_SERVE, MODEL, write_tokenizer

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32


class Measured(Struct, frozen=True):
    tokens_per_s: float
    ttft_ms: float


class Clients(Struct, frozen=True):
    """The three clients, each of which measures the server once."""

    url: str
    folder: Path
    vllm_python: str
    guidellm_python: str
    connections: int
    requests: int
    core: list[str]
    """The command that keeps a client on its core."""

    def weft(self) -> Measured:
        work = f"{self.connections}x{self.requests}:{PROMPT_TOKENS}:{OUTPUT_TOKENS}"
        file = self.folder / "weft.json"
        self._run([sys.executable, "-m", "weft", "bench", "serve", self.url, "--work", work, "--runs", "1",
                   "--json", str(file)])  # fmt: skip
        report = json.loads(file.read_text())
        return Measured(report["tokens_per_sec"], report["ttft_ms"])

    def vllm(self) -> Measured:
        self._run(
            [
                self.vllm_python, "-c", BENCH_SERVE, "--backend", "openai", "--base-url", self.url,
                "--endpoint", "/v1/completions", "--model", MODEL, "--tokenizer", str(self.folder),
                "--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS),
                "--random-output-len", str(OUTPUT_TOKENS), "--ignore-eos", "--max-concurrency", str(self.connections),
                "--num-prompts", str(self.requests), "--num-warmups", "2", "--save-result",
                "--result-dir", str(self.folder), "--result-filename", "vllm.json",
            ]
        )  # fmt: skip
        result = json.loads((self.folder / "vllm.json").read_text())
        assert result["completed"] == self.requests and not result["failed"], result
        return Measured(result["output_throughput"], result["median_ttft_ms"])

    def guidellm(self) -> Measured:
        file = self.folder / "guidellm.json"
        self._run(
            [
                self.guidellm_python, "-m", "guidellm", "run",
                "--backend", f"kind=openai_http,target={self.url},model={MODEL},request_format=/v1/completions",
                "--profile", f"kind=concurrent,streams={self.connections}",
                "--constraint", f"kind=max_requests,count={self.requests}",
                "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
                "--tokenizer", f"kind=hf_auto,model={self.folder}", "--output", f"kind=json,path={file}",
                "--disable-console",
            ]
        )  # fmt: skip
        (benchmark,) = json.loads(file.read_text())["benchmarks"]
        metrics = benchmark["metrics"]
        assert metrics["request_totals"]["successful"] == self.requests, metrics["request_totals"]
        return Measured(
            metrics["output_tokens_per_second"]["successful"]["mean"],
            metrics["time_to_first_token_ms"]["successful"]["median"],
        )

    def _run(self, command: list[str]) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run([*self.core, *command], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{command[0]} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="The Python that has vLLM.")
    parser.add_argument("--guidellm", required=True, help="The Python that has guidellm.")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.05)
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    apart = len(cores) > 1
    under = ("taskset", "-c", str(cores[0])) if apart else ()
    rest = ["taskset", "-c", ",".join(map(str, cores[1:]))] if apart else []
    with (
        tempfile.TemporaryDirectory() as name,
        Server("--image-model", "none", "--threads", "1", under=under) as server,
    ):
        folder = Path(name)
        write_tokenizer(folder)
        clients = Clients(server.url, folder, asked.vllm, asked.guidellm, asked.connections, asked.requests, rest)
        ways: dict[str, Callable[[], Measured]] = {
            "weft bench serve": clients.weft,
            "vllm bench serve": clients.vllm,
            "guidellm": clients.guidellm,
        }
        figures: dict[str, list[Measured]] = {name: [] for name in ways}
        for number in range(asked.rounds):
            order = list(ways.items())
            for name, measure in order[number % len(order) :] + order[: number % len(order)]:
                figures[name].append(measure())
                print(f"round {number + 1}, {name}: {figures[name][-1]}", flush=True)
    sys.exit(compare(figures, asked.tolerance))


def compare(figures: dict[str, list[Measured]], tolerance: float) -> int:
    table = Table("client", "output tok/s", "over Weft's", "TTFT p50, ms", "over Weft's")
    medians = {
        name: Measured(
            statistics.median(each.tokens_per_s for each in rounds), statistics.median(each.ttft_ms for each in rounds)
        )
        for name, rounds in figures.items()
    }
    own = medians["weft bench serve"]
    agree = True
    for name, median in medians.items():
        speed, first = median.tokens_per_s / own.tokens_per_s, median.ttft_ms / own.ttft_ms
        agree = agree and abs(speed - 1) <= tolerance and abs(first - 1) <= tolerance
        table.add_row(name, f"{median.tokens_per_s:.1f}", f"{speed:.3f}", f"{median.ttft_ms:.1f}", f"{first:.3f}")
    Console().print(table)
    return 0 if agree else 1


if __name__ == "__main__":
    main()
