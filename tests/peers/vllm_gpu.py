"""Weft and vLLM on one GPU, in turns: `python -m tests.peers.vllm_gpu KIND --vllm PYTHON`.

KIND is bfloat16, fp8 or int4: the deepseek-llm-7b shape with random weights, offline, each system by its own Python
interface, decoding in steps of full batches. Or it is long: 16 connections of prompts of 16,000 tokens to a
Llama-3.1-8B shape, over HTTP. int4 is an AWQ checkpoint for vLLM (groups of 128), and for Weft --quantization int4 and
w4a8 in turn.

vLLM has its own defaults, CUDA graphs and compilation among them, but no prefix cache: prompts are random. The
command prints a table, the medians of --runs, and ends with 1 where Weft is behind.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.waiting import wait_until
from weft.bench.offline import LEAST_SECONDS

SEVEN_B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 30,
    "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 102400,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
EIGHT_B = SEVEN_B | {
    "num_hidden_layers": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
VOCABULARY = 100_000
BATCHES, LENGTHS, THROUGHPUT = (1, 8, 32, 128, 256), (128, 2048), (256, 512, 256)
LONG_WORK = "16x32:16000:128"
TIMES = ("first token", "between tokens", "start")
"""Lines of which less is better."""
Figures = dict[str, float]


def write_model(folder: Path, facts: dict[str, Any]) -> Path:
    """Write what both read of a model without weights: its shape, and a tokenizer that nothing asks."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(facts))
    words = {f"w{number}": number for number in range(facts["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="w2")).save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w0", "eos_token": "w1", "unk_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def weft_environment(quantization: str, share: float) -> dict[str, str]:
    return os.environ | {
        "WEFT_LOAD_FORMAT": "dummy", "WEFT_GPU_MEMORY_UTILIZATION": str(share), "WEFT_DTYPE": "bfloat16",
        "WEFT_IMAGE_MODEL": "none", "WEFT_QUANTIZATION": quantization,
    }  # fmt: skip


def weft_offline(model: Path, quantization: str, runs: int) -> Figures:
    """Return the figures of `weft bench offline`, by name."""
    file = model / "weft.json"
    requests, inputs, outputs = map(str, THROUGHPUT)
    _run(
        [
            sys.executable, "-m", "weft", "bench", "offline", str(model), "--engine", "native", "--device", "cuda",
            "--batch-sizes", ",".join(map(str, BATCHES)), "--prompt-lengths", ",".join(map(str, LENGTHS)),
            "--requests", requests, "--input-tokens", inputs, "--output-tokens", outputs, "--runs", str(runs),
            "--json", str(file),
        ],
        weft_environment(quantization, 0.88),
    )  # fmt: skip
    report = json.loads(file.read_text())
    return {figure["name"]: figure["value"] for figure in report["figures"]} | {"start": report["startup_seconds"]}


def vllm_offline(python: str, model: Path, more: dict[str, Any], runs: int) -> Figures:
    work = {
        "engine": {
            "model": str(model), "load_format": "dummy", "dtype": "bfloat16", "gpu_memory_utilization": 0.88,
            "max_model_len": 4096, "max_num_seqs": 256, "enable_prefix_caching": False, "skip_tokenizer_init": True,
            "disable_log_stats": True, **more,
        },
        "batch_sizes": BATCHES, "prompt_lengths": LENGTHS, "throughput": THROUGHPUT, "runs": runs, "seed": 0,
        "vocabulary": VOCABULARY, "least_seconds": LEAST_SECONDS,
    }  # fmt: skip
    program = Path(__file__).with_name("vllm_offline.py")
    printed = _run([python, str(program), json.dumps(work)], vllm_environment())
    (line,) = [line for line in printed.splitlines() if line.startswith("FIGURES ")]
    figures = json.loads(line.removeprefix("FIGURES "))
    return {name: one if name == "start" else one["value"] for name, one in figures.items()}


def vllm_environment() -> dict[str, str]:
    """Return the environment of vLLM, whose packages VLLM_PYTHONPATH may name."""
    own = {"PYTHONPATH": os.environ["VLLM_PYTHONPATH"]} if "VLLM_PYTHONPATH" in os.environ else {}
    return os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"} | own


def weft_long(model: Path, runs: int) -> Figures:
    return _load([str(model), "--engine", "native", "--device", "cuda"], model, runs)


def vllm_long(python: str, model: Path, runs: int) -> Figures:
    with vllm_server(python, model) as (url, seconds):
        return _load(["--url", url], model, runs) | {"start": seconds}


@contextmanager
def vllm_server(python: str, model: Path) -> Iterator[tuple[str, float]]:
    """Start `vllm serve`, and yield its address and the seconds until it was ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = "import sys; from vllm.entrypoints.cli.main import main; sys.argv[0] = 'vllm'; main()"
    command = [
        python, "-c", program, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--load-format",
        "dummy", "--dtype", "bfloat16", "--gpu-memory-utilization", "0.85", "--no-enable-prefix-caching",
    ]  # fmt: skip
    url, began = f"http://127.0.0.1:{port}", time.perf_counter()

    def has_started() -> bool:
        if server.poll() is not None:
            sys.exit(f"vLLM did not start:\n{(model / 'vllm.log').read_text()[-4000:]}")
        return _is_ready(url)

    with (model / "vllm.log").open("w") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=vllm_environment(), start_new_session=True
        )
    try:
        wait_until(has_started, "vLLM's start")
        yield url, time.perf_counter() - began
    finally:
        server.terminate()
        server.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _load(target: Sequence[str], model: Path, runs: int) -> Figures:
    """Return the figures of `weft bench serve` against a server, or one of its own."""
    file = model / "load.json"
    _run(
        [
            sys.executable, "-m", "weft", "bench", "serve", *target, "--vocabulary", str(VOCABULARY),
            "--runs", str(runs), "--work", LONG_WORK, "--json", str(file),
        ],
        weft_environment("", 0.85),
    )  # fmt: skip
    report = json.loads(file.read_text())
    (point,) = report["figures"]
    if point["num_failures"]:
        sys.exit(f"{point['num_failures']} requests failed")
    times = {"first token": point["first_token_ms"], "between tokens": point["inter_token_ms"]}
    lines = {f"{name} {part}, ms": one[part] for name, one in times.items() for part in ("p50", "p99")}
    started = report["startup_seconds"]
    return {"output tok/s": point["output_tokens_per_s"], **lines} | ({"start": started} if started else {})


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        sys.exit(f"{command[:4]} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["bfloat16", "fp8", "int4", "long"])
    parser.add_argument("--vllm", default=sys.executable, help="The Python that has vLLM.")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--save", type=Path)
    told = parser.parse_args()
    if shutil.which(told.vllm) is None:
        parser.error(
            f"There is no Python at {told.vllm}: --vllm (make's VLLM_PYTHON) is to name the one that has vLLM."
        )
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name, "model"), EIGHT_B if told.kind == "long" else SEVEN_B)
        runs = told.runs
        if told.kind == "long":
            systems = {"Weft": partial(weft_long, model, runs), "vLLM": partial(vllm_long, told.vllm, model, runs)}
        elif told.kind == "int4":
            awq = write_model(Path(name, "awq"), SEVEN_B | {"quantization_config": AWQ})
            systems = {
                "Weft, w4a8": partial(weft_offline, model, "w4a8", runs),
                "vLLM, AWQ": partial(vllm_offline, told.vllm, awq, {}, runs),
                "Weft, int4": partial(weft_offline, model, "int4", runs),
            }
        else:
            given = {"quantization": "fp8"} if told.kind == "fp8" else {}
            systems = {
                "Weft": partial(weft_offline, model, told.kind if given else "", runs),
                "vLLM": partial(vllm_offline, told.vllm, model, given, runs),
            }
        measured = {}
        for system, measure in systems.items():
            measured[system] = measure()
            print(system, json.dumps(measured[system]), flush=True)
            if told.save:
                told.save.write_text(json.dumps(measured))
    table = Table(told.kind, *measured, "the first is ahead")
    own, peer = list(measured.values())[:2]
    ahead = {line: peer[line] / own[line] if line.startswith(TIMES) else own[line] / peer[line] for line in peer}
    for line, times in ahead.items():
        table.add_row(line, *(f"{figures[line]:,.1f}" for figures in measured.values()), f"{times:.2f} ×")
    Console(width=120).print(table)
    sys.exit(int(min(ahead.values()) < 1))


if __name__ == "__main__":
    main()
