"""One server measured by three clients in turns: `make show-agreement`.

`weft bench serve`, `vllm bench serve` and guidellm put the same load on the same server: a closed loop of a few
connections, with prompts that are texts of random tokens. The command prints tokens a second and the median time to the
first token of each, and ends with 1 where one of them differs from Weft's by more than --tolerance.

vLLM and guidellm are large, so each lives in a virtual environment of its own, whose Pythons are the arguments. The
server is one of the default model, with a core of its own where there are two; or --url names one that runs already,
with a folder that has its tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from tests.e2e.server import Server
from tests.peers.vllm_bench import BENCH_SERVE, MODEL, write_tokenizer

WARM_UP = 2


class Measured(Struct, frozen=True):
    tokens_per_s: float
    ttft_ms: float


class Clients(Struct, frozen=True):
    """The three clients, each of which measures the server once."""

    url: str
    model: str
    tokenizer: Path
    folder: Path
    """The place of their reports."""
    vllm_python: str
    guidellm_python: str
    connections: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    core: list[str]
    """The command that keeps a client on its core."""

    def weft(self) -> Measured:
        prompts, file = self.folder / "prompts.jsonl", self.folder / "weft.json"
        with prompts.open("w") as lines:
            for text in self._texts(self.requests + WARM_UP):
                asked = {"prompt": text, "max_tokens": self.output_tokens, "ignore_eos": True}
                lines.write(json.dumps(asked) + "\n")
        self._run(
            [
                sys.executable, "-m", "weft", "bench", "serve", self.url, "--dataset-file", str(prompts),
                "--concurrency", str(self.connections), "--requests", str(self.requests), "--runs", "1",
                "--warm-up", str(WARM_UP), "--json", str(file),
            ]
        )  # fmt: skip
        report = json.loads(file.read_text())
        return Measured(report["tokens_per_sec"], report["ttft_ms"])

    def _texts(self, count: int) -> Iterator[str]:
        """Texts of `prompt_tokens` tokens, which are new each time, as the other two clients make them."""
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        words = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
        for _ in range(count):
            tokens = random.choices(words, k=self.prompt_tokens)
            while len(again := tokenizer.encode(tokenizer.decode(tokens))) != self.prompt_tokens:
                # Neighbours may be one token together, and halves of a character several.
                tokens = [*again, *random.choices(words, k=self.prompt_tokens)][: self.prompt_tokens]
            yield tokenizer.decode(again)

    def vllm(self) -> Measured:
        self._run(
            [
                self.vllm_python, "-c", BENCH_SERVE, "--backend", "openai", "--base-url", self.url,
                "--endpoint", "/v1/completions", "--model", self.model, "--tokenizer", str(self.tokenizer),
                "--dataset-name", "random", "--random-input-len", str(self.prompt_tokens),
                "--random-output-len", str(self.output_tokens), "--ignore-eos",
                "--max-concurrency", str(self.connections), "--num-prompts", str(self.requests),
                "--num-warmups", str(WARM_UP), "--save-result",
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
                "--backend", f"kind=openai_http,target={self.url},model={self.model},request_format=/v1/completions",
                "--profile", f"kind=concurrent,streams={self.connections}",
                "--constraint", f"kind=max_requests,count={self.requests}",
                "--data", f"kind=synthetic_text,prompt_tokens={self.prompt_tokens},output_tokens={self.output_tokens}",
                "--tokenizer", f"kind=hf_auto,model={self.tokenizer}", "--output", f"kind=json,path={file}",
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


@contextmanager
def running_server() -> Iterator[tuple[str, list[str]]]:
    """A server of the default model: its URL, and the command that keeps a client away from its core."""
    cores = sorted(os.sched_getaffinity(0))
    apart = len(cores) > 1
    under = ("taskset", "-c", str(cores[0])) if apart else ()
    with Server("--image-model", "none", "--threads", "1", under=under) as server:
        yield server.url, ["taskset", "-c", ",".join(map(str, cores[1:]))] if apart else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="The Python that has vLLM.")
    parser.add_argument("--guidellm", required=True, help="The Python that has guidellm.")
    parser.add_argument("--url", help="A server that runs already.")
    parser.add_argument("--model", default=MODEL, help="The name of its model.")
    parser.add_argument("--tokenizer", type=Path, help="A folder with its model's tokenizer and configuration.")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.05)
    asked = parser.parse_args()
    if bool(asked.url) != bool(asked.tokenizer):
        parser.error("--url and --tokenizer belong together")
    given = nullcontext((asked.url, []))
    with tempfile.TemporaryDirectory() as name, given if asked.url else running_server() as (url, core):
        folder = Path(name)
        if not asked.tokenizer:
            write_tokenizer(folder)
        clients = Clients(
            url=url,
            model=asked.model,
            tokenizer=asked.tokenizer or folder,
            folder=folder,
            vllm_python=asked.vllm,
            guidellm_python=asked.guidellm,
            connections=asked.connections,
            requests=asked.requests,
            prompt_tokens=asked.prompt_tokens,
            output_tokens=asked.output_tokens,
            core=core,
        )
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
