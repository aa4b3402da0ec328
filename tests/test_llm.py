"""Tests the Python API over the real engine process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from weft import LLM, SamplingParams
from weft.bench.commands import app as bench
from weft.bench.offline import OfflineWork, run_offline
from weft.checkpoint.model_files import ModelFiles
from weft.config import load
from weft.errors import ConfigError, InvalidRequest
from weft.types import FinishReason

GREEDY = SamplingParams(temperature=0, max_tokens=12)
FEW = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm(smollm2_files: ModelFiles) -> Iterator[LLM]:
    with LLM("smollm2", kv_cache_memory_mb=128, max_model_len=1024) as llm:
        yield llm


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["One, two, three, four,", "The capital of France is", "One, two, three, four,"]
    answers = llm.generate(prompts, GREEDY)
    assert "five" in answers[0].text and "Paris" in answers[1].text
    assert answers[0].text == answers[2].text
    assert all(len(answer.token_ids) == answer.usage.completion_tokens for answer in answers)


def test_a_chat_and_its_stream_say_the_same(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    (answer,) = llm.chat(conversation, GREEDY)
    deltas = list(llm.stream(conversation, GREEDY))
    assert "".join(delta.text for delta in deltas) == answer.text
    assert deltas[-1].finish is answer.finish


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.7, "seed": 3, "logprobs": 2}])
def test_drafts_change_nothing(llm: LLM, params: dict[str, Any]) -> None:
    """A list that is counted on is drafted from itself."""
    items = "".join(f"{i}. The loom number {i} is ready.\n" for i in range(1, 9))
    plain, drafted = (
        llm.generate(items, SamplingParams(max_tokens=32, ignore_eos=True, speculative=drafts, **params))[0]
        for drafts in (False, True)
    )
    assert (drafted.text, drafted.token_ids) == (plain.text, plain.token_ids)
    # torch sums the exponentials of several rows in another order than those of one.
    for one, other in zip(drafted.logprobs or [], plain.logprobs or [], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert drafted.usage.draft_tokens >= drafted.usage.accepted_tokens > 5
    assert plain.usage.draft_tokens == plain.usage.accepted_tokens == 0


def test_leaving_a_stream_ends_its_request(llm: LLM) -> None:
    endless = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    next(stream := llm.stream("Once upon a time", endless))
    stream.close()
    assert llm._engine.stats().open_requests == 0
    assert llm.generate([5, 6, 7], FEW)[0].finish in (FinishReason.STOP, FinishReason.LENGTH)


def test_mistakes_are_raised(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="context"):
        llm.generate([[1] * 2000], GREEDY)
    with pytest.raises(InvalidRequest, match="temperature is -1") as refused:
        llm.generate("a", SamplingParams(temperature=-1))
    assert refused.value.param == "temperature"
    with pytest.raises(InvalidRequest, match="logit_bias has the token id 10000000"):
        list(llm.stream("a", SamplingParams(logit_bias={10**7: 1.0})))
    with pytest.raises(InvalidRequest, match="2 sampling parameters for 1 prompts"):
        llm.generate("a", [GREEDY, GREEDY])
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM("smollm2", max_num_seq=4)


def test_whole_numbers_of_any_kind_are_token_ids(llm: LLM) -> None:
    [plain] = llm.generate([5, 6, 7], FEW)
    for same in (np.array([5, 6, 7]), np.array([[5, 6, 7]], np.int32), [np.int64(5), 6, np.uint8(7)], [(5, 6, 7)]):
        [found] = llm.generate(same, FEW)
        assert found.token_ids == plain.token_ids and found.usage.prompt_tokens == 3
    assert [token for delta in llm.stream(np.array([5, 6, 7]), FEW) for token in delta.token_ids] == plain.token_ids


@pytest.mark.parametrize(
    ("prompt", "odd"),
    [
        ([1, "two", 3.0, 4], "'two' is not a token id"),
        ([1, 3.0], "3.0 is not a token id"),
        ([True, 1], "True is not a token id"),
        ([1, None], "None is not a token id"),
        ([1, {"role": "user", "content": "hi"}], "'role'.* is not a token id"),
        (np.array([1.5, 2.0]), "1.5.* is not a prompt"),
        (np.array([[1.5, 2.0]]), "--allow-prompt-embeds"),
        ([[{"role": "user", "content": "hi"}, 1]], "1 is not a message"),
        (["hi", 1], "1 is not a prompt"),
        ([None], "None is not a prompt"),
        ([[]], "empty"),
    ],
)
def test_what_is_no_part_of_a_prompt_is_named_and_not_dropped(llm: LLM, prompt: Any, odd: str) -> None:
    with pytest.raises(InvalidRequest, match=odd):
        llm.generate(prompt, GREEDY)


def test_the_offline_benchmark_counts_real_tokens(tiny_model: Path) -> None:
    seen: list[str] = []
    work = OfflineWork(batch_sizes=(2,), prompt_lengths=(16,), requests=3, input_tokens=8, output_tokens=4, runs=1)
    config = load({"model": str(tiny_model), "num_blocks": 64}, env={})
    report = asyncio.run(run_offline(config, work, seen.append))
    assert [figure.unit for figure in report.figures] == ["tok/s", "ms", "output tok/s"]
    assert len(seen) == 6
    assert report.engine_peak_mib > 50


def test_the_benchmark_command_writes_a_table_and_json(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    words = [
        "offline",
        str(tiny_model),
        "--batch-sizes",
        "1",
        "--prompt-lengths",
        "8",
        "--requests",
        "2",
        "--runs",
        "1",
    ]
    words += ["--input-tokens", "4", "--output-tokens", "2", "--json", str(file)]
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 0, done.output
    assert "decode, batch 1" in done.output
    assert len(msgspec.json.decode(file.read_bytes())["figures"]) == 3
    assert CliRunner().invoke(bench, ["offline", "--batch-sizes", "0"]).exit_code == 2
