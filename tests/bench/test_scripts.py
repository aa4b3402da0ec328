"""The CY-LLM Engine's eight commands, each against a real server."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.e2e.tiny_server import TinyServer
from weft.bench.commands import app as bench

ROOT = Path(__file__).parents[2]
NAMES = (
    "benchmark_token_speed", "benchmark_compare", "benchmark_ttft", "verify_streaming_content",
    "monitor_grpc_messages", "load_test_grpc", "test_api_compatibility", "stress_test",
)  # fmt: skip


def script(name: str, *words: str) -> Result:
    app = importlib.import_module(f"weft.bench.scripts.{name}").app
    return CliRunner().invoke(app, words)


@pytest.fixture
def server(long_server: TinyServer) -> tuple[str, str]:
    """The addresses of a server: of HTTP, and of gRPC."""
    return long_server.url, f"127.0.0.1:{long_server.grpc_port()}"


@pytest.mark.parametrize("name", NAMES)
def test_each_has_help_and_a_file_of_its_own(name: str) -> None:
    done = script(name, "--help")
    assert done.exit_code == 0 and "--output" in done.output and "exit code is 1" in " ".join(done.output.split())
    ran = runpy.run_path(str(ROOT / "scripts" / f"{name}.py"))
    assert ran["app"] is importlib.import_module(f"weft.bench.scripts.{name}").app


def test_token_speed_is_measured_and_judged(server: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "baseline_result.json"
    words = ("--url", server[0], "--max-tokens", "8", "--runs", "3", "--output", str(file))
    good = script("benchmark_token_speed", *words, "--min-tokens-per-s", "0.001", "--max-std-dev", "1e9")
    assert good.exit_code == 0 and "pass" in good.output, good.output
    report = json.loads(file.read_text())
    assert {"tokens_per_sec", "ttft_ms", "std_dev", "runs", "seed", "environment"} <= report.keys()
    assert report["figures"][0]["runs"][0]["requests"] == 3, "the three standard prompts"
    bad = script("benchmark_token_speed", *words, "--no-warmup", "--prompt", "Hello", "--min-tokens-per-s", "1e9")
    assert bad.exit_code == 1 and "FAIL" in bad.output
    unsteady = script("benchmark_token_speed", *words, "--min-tokens-per-s", "0.001", "--max-std-dev", "0")
    assert unsteady.exit_code == 1 and "standard deviation" in unsteady.output, unsteady.output


def test_a_report_is_neither_better_nor_worse_than_itself_and_half_is_worse(
    server: tuple[str, str], tmp_path: Path
) -> None:
    before, after = tmp_path / "baseline.json", tmp_path / "final_result.json"
    script("benchmark_token_speed", "--url", server[0], "--max-tokens", "4", "--runs", "3", "--output", str(before))
    same = script("benchmark_compare", "--before", str(before), "--after", str(before))
    assert same.exit_code == 0 and "worse" not in same.output, same.output
    report = json.loads(before.read_text())
    for run in report["figures"][0]["runs"]:
        run["output_tokens_per_s"] = 10 + run["output_tokens_per_s"] / 1e9
    before.write_text(json.dumps(report))
    for run in report["figures"][0]["runs"]:
        run["output_tokens_per_s"] /= 2
    after.write_text(json.dumps(report))
    worse = script("benchmark_compare", "--before", str(before), "--after", str(after))
    assert worse.exit_code == 1 and "0.500" in worse.output and "worse" in worse.output
    better = script("benchmark_compare", "--before", str(after), "--after", str(before))
    assert better.exit_code == 0 and "better" in better.output


@pytest.mark.parametrize(("bound", "code"), [("600000", 0), ("0.0001", 1)])
def test_the_first_token_is_judged(server: tuple[str, str], bound: str, code: int) -> None:
    done = script("benchmark_ttft", "--url", server[0], "--runs", "1", "--max-ttft-ms", bound)
    assert done.exit_code == code, done.output


def test_content_is_the_same_by_every_way(server: tuple[str, str], tmp_path: Path) -> None:
    url, address = server
    words = ("--url", url, "--address", address, "--max-tokens", "12", "--output", str(tmp_path / "content.json"))
    done = script("verify_streaming_content", *words)
    assert done.exit_code == 0 and done.output.count("same") == 3, done.output
    read = json.loads((tmp_path / "content.json").read_text())
    assert all({"whole", "streamed", "gRPC"} == each["ways"].keys() and each["text"] for each in read["checked"])


def test_streams_are_loaded_and_their_messages_counted(server: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "msg_stats.json"
    common = ("--address", server[1], "--duration", "0.3", "--max-tokens", "24", "--output", str(file))
    done = script("monitor_grpc_messages", *common, "--concurrency", "2")
    assert done.exit_code == 0, done.output
    run: dict[str, Any] = json.loads(file.read_text())["run"]
    assert run["errors"] == {} and run["output_tokens"] > run["messages"] > run["succeeded"] > 0
    loaded = script("load_test_grpc", *common, "--concurrency", "5", "--min-requests-per-s", "1e9")
    assert loaded.exit_code == 1 and "FAIL" in loaded.output and "none" in loaded.output, loaded.output


def test_the_frozen_interfaces_are_as_they_were(server: tuple[str, str]) -> None:
    done = script("test_api_compatibility", "--url", server[0], "--address", server[1])
    assert done.exit_code == 0 and "14 of 14" in done.output, done.output


def test_memory_and_files_are_watched(tiny_model: Path, tmp_path: Path) -> None:
    """In a process of its own, of whose processes all are the server's."""
    file = tmp_path / "stress.json"
    words = ("--duration", "0.3", "--concurrency", "2", "--max-tokens", "4", "--input-words", "2-6")
    command = [
        sys.executable,
        "-m",
        "weft.bench.scripts.stress_test",
        *words,
        "--model",
        str(tiny_model),
        "--output",
        str(file),
    ]
    env = {**os.environ, "CY_LLM_ENGINE": "native", "WEFT_IMAGE_MODEL": "none", "WEFT_MAX_MODEL_LEN": "512"}
    done = subprocess.run(
        [*command, "--max-mb-per-minute", "1e9"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["http"]["succeeded"] and report["grpc"]["succeeded"]
    assert report["samples"][0]["megabytes"] > 10 and report["samples"][-1]["files"] > 3


def test_a_server_is_put_under_load_over_grpc(server: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    address = f"grpc://{server[1]}"
    words = ["serve", address, "--rate", "50", "--requests", "10", "--runs", "1", "--dataset", "standard"]
    done = CliRunner().invoke(bench, [*words, "--output-tokens", "6", "--json", str(file)])
    assert done.exit_code == 0, done.output
    [run] = json.loads(file.read_text())["figures"][0]["runs"]
    assert run["succeeded"] == 10 and run["output_tokens"] == 60 and run["first_token_ms"]["p50"] > 0
