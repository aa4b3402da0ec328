"""Log probabilities of prompts and vectors of prompts, from real models: what transformers gives, however the work is
cut up, and without a trace in anybody else's tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from tests.tiny_models import VOCAB_SIZE
from tests.worker.driving import Driven, Outcome, load, request, run, under_reference, watched_logits
from tests.worker.subjects import Subject, alone
from weft.types import FinishReason, Pooling, Request, TokenLogprob

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ["llama3", "qwen3"]
PROMPTS = [[(a * i + b) % VOCAB_SIZE for i in range(n)] for a, b, n in ((7, 1, 5), (31, 2, 33), (11, 3, 100))]
CONDITIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "late": {"overlap": True},
    "chunks": {"max_prefill_chunk": 7},
    "preempted": {"force_preempt_every": 3, "overlap": True, "max_prefill_chunk": 16},
    "uncached": {"enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def judge() -> Any:
    from tests.model import reference_models

    return reference_models


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: Any, judge: Any, tiny_directory: Callable[[str], Path]) -> tuple[Driven, Any]:
    folder = tiny_directory(request.param)
    return load(folder), judge.from_directory(folder)


@pytest.fixture(scope="module")
def company(tiny_directory: Callable[[str], Path]) -> Subject:
    return alone(load(tiny_directory("llama3"), num_blocks=256), PROMPTS, 12)


def scored(count: int = 3, num_tokens: int = 4) -> list[Request]:
    return [request(f"scored {i}", prompt, num_tokens, prompt_logprobs=count) for i, prompt in enumerate(PROMPTS)]


def embedding(name: str, prompt: list[int], pooling: Pooling) -> Request:
    return replace(request(name, prompt, 1), pooling=pooling)


def embeddings() -> list[Request]:
    return [embedding(f"{kind} {i}", prompt, kind) for i, prompt in enumerate(PROMPTS) for kind in Pooling]


def vector(outcome: Outcome, name: str) -> Tensor:
    output = outcome.outputs[name]
    assert output.finish is FinishReason.STOP and output.embedding is not None and output.token_ids == []
    return torch.from_numpy(np.frombuffer(output.embedding, dtype=np.float32).copy())


def vectors(outcome: Outcome) -> dict[str, Tensor]:
    return {name: vector(outcome, name) for name in outcome.outputs if name.split()[0] in list(Pooling)}


def assert_scores(got: list[TokenLogprob] | None, logits: Tensor, prompt: list[int], count: int) -> None:
    """`logits`: what a model gives after each token of the prompt."""
    expected = logits[: len(prompt) - 1].log_softmax(-1)
    assert got is not None and len(got) == len(prompt) - 1
    chosen = torch.tensor([one.logprob for one in got])
    torch.testing.assert_close(chosen, expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], atol=1e-4, rtol=0)
    values, _ = expected.topk(count)
    for one, row, likeliest in zip(got, expected, values, strict=True):
        ids = [token for token, _ in one.top]
        assert len(set(ids)) == count
        torch.testing.assert_close(torch.tensor([value for _, value in one.top]), likeliest, atol=1e-4, rtol=0)
        torch.testing.assert_close(row[ids], likeliest, atol=1e-4, rtol=0)


@torch.inference_mode()
def expected_vector(reference: Any, prompt: list[int], pooling: Pooling) -> Tensor:
    hidden = reference.model(torch.tensor([prompt])).last_hidden_state[0]
    return torch.nn.functional.normalize(hidden.mean(0) if pooling is Pooling.MEAN else hidden[-1], dim=0)


# Log probabilities of prompts.


@pytest.mark.parametrize("condition", CONDITIONS)
def test_prompts_are_scored_as_transformers_scores_them(tiny: tuple[Driven, Any], condition: str, judge: Any) -> None:
    driven, reference = tiny
    outcome = run(driven, scored(), **CONDITIONS[condition])
    for i, prompt in enumerate(PROMPTS):
        got = outcome.outputs[f"scored {i}"].prompt_logprobs
        assert_scores(got, judge.logits(reference, prompt), prompt, 3)


def test_the_torch_path_scores_the_same(tiny: tuple[Driven, Any], judge: Any) -> None:
    driven, reference = tiny
    outcome = run(under_reference(driven), [*scored(0), *embeddings()], max_prefill_chunk=20)
    for i, prompt in enumerate(PROMPTS):
        got = outcome.outputs[f"scored {i}"].prompt_logprobs
        assert_scores(got, judge.logits(reference, prompt), prompt, 0)
        for pooling in Pooling:
            expected = expected_vector(reference, prompt, pooling)
            torch.testing.assert_close(vector(outcome, f"{pooling} {i}"), expected, atol=1e-5, rtol=0)


def test_an_embedding_does_not_depend_on_where_its_prompt_is_cut(tiny: tuple[Driven, Any]) -> None:
    """To the bit: how much of a prompt a step computes follows the time that steps take."""
    driven, _ = tiny
    prompt = [(13 * i + i // 7) % VOCAB_SIZE for i in range(100)]
    for pooling in Pooling:
        asked = [embedding("e", prompt, pooling)]
        vectors = {
            run(driven, asked, max_prefill_chunk=chunk).outputs["e"].embedding for chunk in (128, *range(1, 64, 6))
        }
        assert len(vectors) == 1


def test_a_prompt_token_scores_what_it_would_as_a_sampled_one(tiny: tuple[Driven, Any]) -> None:
    """To the bit: the same logits, and the same way from them."""
    driven, _ = tiny
    written = run(driven, [request("r", PROMPTS[1], 12, logprobs=5)]).outputs["r"]
    whole = PROMPTS[1] + written.token_ids
    outcome = run(driven, [request("again", whole, 1, prompt_logprobs=5)])
    assert outcome.outputs["again"].prompt_logprobs[len(PROMPTS[1]) - 1 :] == written.logprobs


def test_scores_are_those_of_the_logits_that_are_sampled_from(tiny: tuple[Driven, Any]) -> None:
    driven, _ = tiny
    prompt = PROMPTS[1]
    with watched_logits() as seen:
        for length in range(1, len(prompt)):
            run(driven, [request("r", prompt[:length], 1)])
    got = run(driven, [request("r", prompt, 1, prompt_logprobs=2)]).outputs["r"].prompt_logprobs
    assert_scores(got, torch.cat(seen), prompt, 2)


def test_a_long_prompt_is_scored_over_several_steps(tiny_directory: Callable[[str], Path], judge: Any) -> None:
    folder = tiny_directory("llama3")
    driven = load(folder, max_model_len=512)
    prompt = [(13 * i + i // 7) % VOCAB_SIZE for i in range(500)]
    outcome = run(
        driven, [request("r", prompt, 2, prompt_logprobs=1), request("o", prompt[5:], 2)], max_prefill_chunk=2048
    )
    assert_scores(outcome.outputs["r"].prompt_logprobs, judge.logits(judge.from_directory(folder), prompt), prompt, 1)
    assert outcome.stats.steps >= 3


def test_scoring_changes_nobodys_tokens(company: Subject) -> None:
    others = [(step, one) for step, one in zip((0, 3, 9), scored(), strict=True)]
    for condition in ({}, {"overlap": True, "max_prefill_chunk": 7, "force_preempt_every": 5}):
        company.check(run(company.driven, company.requests(), later=others, **condition))
    asked = [replace(one, params=replace(one.params, prompt_logprobs=2)) for one in company.requests()]
    company.check(run(company.driven, asked))


def test_a_resumed_request_is_not_scored_again(company: Subject) -> None:
    resumed = [replace(one, params=replace(one.params, prompt_logprobs=2)) for one in company.requests(5)]
    outcome = run(company.driven, resumed)
    company.check(outcome, 5)
    assert {output.prompt_logprobs is None for output in outcome.outputs.values()} == {True}


def test_a_prompt_of_one_token_has_no_scores(company: Subject) -> None:
    assert run(company.driven, [request("r", [5], 2, prompt_logprobs=2)]).outputs["r"].prompt_logprobs == []


def test_broken_logits_are_an_error(tiny_directory: Callable[[str], Path]) -> None:
    driven = load(tiny_directory("llama2"))
    driven.runner.stepper.model.weights.embedding[17] = float("nan")
    outcome = run(
        driven,
        [
            request("scored", [1, 17, 3, 4], 3, prompt_logprobs=1),
            embedding("mean", [1, 17, 3], Pooling.MEAN),
            embedding("last", [1, 2, 17], Pooling.LAST),
            embedding("sound", [1, 2, 3], Pooling.MEAN),
        ],
    )
    ends = {name: (output.finish, "not a number" in output.error) for name, output in outcome.outputs.items()}
    broken = (FinishReason.ERROR, True)
    assert ends == {"scored": broken, "mean": broken, "last": broken, "sound": (FinishReason.STOP, False)}


# Vectors of prompts.


@pytest.mark.parametrize("condition", CONDITIONS)
def test_vectors_are_those_of_transformers(tiny: tuple[Driven, Any], condition: str) -> None:
    driven, reference = tiny
    outcome = run(driven, embeddings(), **CONDITIONS[condition])
    for i, prompt in enumerate(PROMPTS):
        for pooling in Pooling:
            got = vector(outcome, f"{pooling} {i}")
            torch.testing.assert_close(got, expected_vector(reference, prompt, pooling), atol=1e-5, rtol=0)
            assert abs(float(got.norm()) - 1) < 1e-6
    assert outcome.stats.generation_tokens == 0
    assert outcome.stats.prompt_tokens == 2 * sum(map(len, PROMPTS))


def test_in_company_a_vector_is_the_one_it_is_alone(company: Subject) -> None:
    """To the bit, where the chunks are the same."""
    driven = company.driven
    for chunk in (7, 256):
        alone = {}
        for one in embeddings():
            alone |= vectors(run(driven, [one], max_prefill_chunk=chunk, enable_prefix_caching=False))
        # Chunks of prompts are cut short by a step's budget, and nothing else: here it has room for all of them.
        together = vectors(run(driven, embeddings(), max_prefill_chunk=chunk, enable_prefix_caching=False))
        assert all(torch.equal(together[name], value) for name, value in alone.items())
    cut = vectors(run(driven, embeddings(), max_prefill_chunk=9))
    for name, value in alone.items():
        torch.testing.assert_close(cut[name], value, atol=1e-5, rtol=0)


def test_chats_beside_vectors_keep_their_tokens(company: Subject) -> None:
    later = [(3 * i, one) for i, one in enumerate(embeddings())]
    for condition in CONDITIONS.values():
        outcome = run(company.driven, company.requests(), later=later, **condition)
        company.check(outcome)
        assert len(vectors(outcome)) == 6


def test_the_last_state_may_follow_a_cached_prefix(company: Subject) -> None:
    asked = embedding("last again", PROMPTS[2], Pooling.LAST)
    fresh = vector(run(company.driven, [replace(asked, request_id="last")]), "last")
    outcome = run(company.driven, [request("first", PROMPTS[2], 2)], later=[(10**6, asked)])
    assert outcome.outputs["last again"].cached_tokens == 96
    torch.testing.assert_close(vector(outcome, "last again"), fresh, atol=1e-5, rtol=0)


def test_sums_of_prompts_that_were_left_are_forgotten(company: Subject) -> None:
    long = embedding("mean", PROMPTS[2], Pooling.MEAN)
    run(company.driven, [long, request("other", [1, 2], 9)], aborts=[(3, "mean")], max_prefill_chunk=7)
    run(company.driven, [request("next", [1], 2)])
    assert company.driven.runner.prompt_outputs._sums == {}


# Siblings, on a real cache.


def test_siblings_write_what_they_write_alone(company: Subject) -> None:
    prompt = PROMPTS[2]
    asked = [request(str(i), prompt, 12, temperature=0.9, seed=i) for i in range(30)]
    expected = {one.request_id: run(company.driven, [one]).tokens(one.request_id) for one in asked}
    assert len({tuple(tokens) for tokens in expected.values()}) > 20
    siblings = [asked[0], *(replace(one, sibling_of="0") for one in asked[1:])]
    for caching, overlap in product([True, False], repeat=2):
        outcome = run(company.driven, siblings, enable_prefix_caching=caching, overlap=overlap)
        assert {name: output.token_ids for name, output in outcome.outputs.items()} == expected
        if caching:
            assert outcome.stats.computed_tokens == 100 + 29 * 4 + 30 * 11
