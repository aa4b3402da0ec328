"""The source system's test cases on real vLLM, through the contract for callers that wait. TC-004 is in test_endpoints,
TC-008 in test_asynchronous and test_synchronous. docs/backends.md has a table of all."""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.backends.vllm.groups import group_of
from tests.backends.vllm.real import EAGER, Heard, eager, needs_vllm
from weft.backends import BaseEngine, create_engine
from weft.bench.commands import app as bench
from weft.types import FinishReason

pytestmark = needs_vllm

SETTINGS = {"max_model_len": 512, "kv_cache_memory_mb": 64, "start_timeout_s": 1000.0}
WORDS = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
HEARD = Heard()


@pytest.fixture(scope="module")
def engine(vllm_model: Path) -> Iterator[BaseEngine]:
    """An engine that cannot be here, and vLLM behind it."""
    restore = eager()
    made = create_engine("cuda-vllm-async,cpu-vllm", **SETTINGS)
    logging.getLogger("weft").addHandler(HEARD)
    made.load_model(str(vllm_model))
    logging.getLogger("weft").removeHandler(HEARD)
    yield made
    made.unload_model()
    restore()


def test_tc_009_the_next_engine_takes_over_and_one_warning_says_why(engine: BaseEngine) -> None:
    assert engine.get_model_info()["engine"] == "cpu-vllm" and engine.health_check()
    (warning,) = HEARD.said
    assert "cuda-vllm-async: this machine has no CUDA device" in warning


def test_tc_001_infer_returns_a_generator(engine: BaseEngine) -> None:
    answer = engine.infer("The weft", **WORDS)
    assert isinstance(answer, types.GeneratorType)
    answer.close()


def test_tc_002_the_stream_is_not_empty_and_is_a_stream(engine: BaseEngine) -> None:
    pieces = list(engine.infer("The weft", **WORDS))
    assert len(pieces) > 1 and "".join(pieces)
    metrics = engine.last_metrics
    assert metrics is not None and metrics.finish is FinishReason.LENGTH and metrics.completion_tokens == 16
    assert 0 < metrics.ttft_seconds <= metrics.generation_seconds and metrics.tokens_per_second > 0


@pytest.mark.parametrize(("size", "num_pieces"), [(4, 5), (5, 4), (100, 2)])
def test_tc_003_the_size_of_pieces_takes_effect(engine: BaseEngine, size: int, num_pieces: int) -> None:
    text = "".join(engine.infer("The weft", **WORDS))
    engine.stream_chunk_size = size
    pieces = list(engine.infer("The weft", **WORDS))
    engine.stream_chunk_size = 1
    # A piece whose tokens have no text yet, for a character may be of several, is none.
    assert "".join(pieces) == text and num_pieces - 1 <= len(pieces) <= num_pieces


def test_tc_007_many_threads_at_once(engine: BaseEngine) -> None:
    prompts = [f"{i} threads" for i in range(12)]
    alone = ["".join(engine.infer(prompt, **WORDS)) for prompt in prompts]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(lambda prompt: "".join(engine.infer(prompt, **WORDS)), prompts)) == alone
    assert engine.infer_batch(prompts, **WORDS) == alone


def test_tc_010_unloading_gives_everything_back(engine: BaseEngine) -> None:
    """The last that uses the engine. Memory is the processes', and these have ended."""
    host: int = engine._blocking.engine.client.engine_pid  # type: ignore[attr-defined]
    processes = group_of(host)
    assert len(processes) >= 3
    usage = engine.get_memory_usage()
    assert 0 < usage["allocated_gb"] <= usage["reserved_gb"] < usage["total_gb"] and 0 < usage["utilization"] < 1
    engine.unload_model()
    assert set(engine.get_memory_usage().values()) == {0.0}
    assert group_of(host) == {} and not engine.health_check()
    engine.unload_model()


def test_tc_005_tc_006_the_benchmark_ends_by_what_is_required(
    vllm_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for its figures, which need a machine of their own."""
    small = {"WEFT_MAX_MODEL_LEN": "512", "WEFT_KV_CACHE_MEMORY_MB": "64", "WEFT_START_TIMEOUT_S": "1000"}
    for name, value in (small | EAGER).items():
        monkeypatch.setenv(name, value)
    work = "offline --engine cpu-vllm --batch-sizes 1 --prompt-lengths 16 --requests 1 --output-tokens 4 --runs 1"
    required = "--require-first-token-ms 600000 --require-tokens-per-s 1e9"
    done = CliRunner().invoke(bench, [*work.split(), str(vllm_model), *required.split()])
    assert done.exit_code == 1, done.output
    assert "cpu-vllm" in done.output and done.output.count("pass") == 1 and done.output.count("FAIL") == 1
