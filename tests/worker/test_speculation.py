"""Drafts change no token: requests whose prompts repeat give, with drafts, what each gave alone and without."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.scheduler.simulation import Oracle
from tests.tiny_adapters import save_adapter
from tests.tiny_models import VOCAB_SIZE
from tests.worker.driving import Driven, Outcome, load, request, run, under_reference, watched_logits
from tests.worker.subjects import SAMPLED, Subject, alone, cases, strangers, tiny_pool
from weft.hub.resolve import resolve
from weft.options import CacheOptions, Config, ModelOptions, SchedulerOptions
from weft.scheduler import cursors
from weft.scheduler.speculation import MAX_DRAFT
from weft.types import Adapter, Request
from weft.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 40
DRAFTS = {"speculates": True, "max_speculative_tokens": 40}


def prompts() -> list[list[int]]:
    return [[(a * i + b) % VOCAB_SIZE for i in range(n)] for a, b, n in ((7, 1, 5), (31, 2, 60), (11, 3, 120))]


@pytest.fixture(scope="module")
def driven(tiny_directory: Callable[[str], Path]) -> Driven:
    return load(tiny_directory("llama3"), num_blocks=256)


@pytest.fixture(scope="module")
def tiny(driven: Driven) -> Subject:
    return alone(driven, prompts(), NUM_TOKENS)


class Foreseeing(Oracle):
    """An oracle that knows several answers, and takes the one that has begun."""

    def __init__(self, tokens: list[int], answers: list[list[int]]) -> None:
        super().__init__(tokens, [], random.Random(len(tokens)))
        self.answers = answers

    def draft(self, pending: int, most: int) -> list[int]:
        self.whole = next((whole for whole in self.answers if whole[: len(self.tokens)] == self.tokens), [])
        return super().draft(pending, most)


def foresee(monkeypatch: pytest.MonkeyPatch, answers: list[list[int]]) -> None:
    """Let drafts be right up to random places, as the lookups of a tiny model hardly are."""
    monkeypatch.setattr(cursors, "NgramDrafter", lambda tokens, prediction: Foreseeing(tokens, answers))


@pytest.fixture
def foreseen(tiny: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    foresee(monkeypatch, [prompt + tiny.alone[name] for name, prompt, _ in cases(tiny.prompts)])


def check(subject: Subject, outcome: Outcome, done: int = 0) -> None:
    subject.check(outcome, done)
    stats = outcome.stats
    assert 0 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.usefixtures("foreseen")
class TestForeseen:
    """Every way to serve them, each with as many right drafts as wrong ones."""

    def test_together(self, tiny: Subject) -> None:
        check(tiny, run(tiny.driven, tiny.requests(), **DRAFTS))

    def test_results_one_step_late(self, tiny: Subject) -> None:
        check(tiny, run(tiny.driven, tiny.requests(), overlap=True, **DRAFTS))

    def test_alone(self, tiny: Subject) -> None:
        for one in tiny.requests():
            assert run(tiny.driven, [one], **DRAFTS).tokens(one.request_id) == tiny.alone[one.request_id]

    def test_with_strangers_in_chunks(self, tiny: Subject) -> None:
        check(tiny, run(tiny.driven, tiny.requests(), later=strangers(5, 20), max_prefill_chunk=7, **DRAFTS))

    @pytest.mark.parametrize("overlap", [False, True])
    def test_preempted(self, tiny: Subject, overlap: bool) -> None:
        outcome = run(tiny.driven, tiny.requests(), force_preempt_every=2, overlap=overlap, **DRAFTS)
        check(tiny, outcome)
        assert outcome.stats.preemptions > 4

    @pytest.mark.parametrize("overlap", [False, True])
    def test_preempted_by_a_tiny_pool(self, tiny: Subject, overlap: bool) -> None:
        check(tiny, tiny_pool(tiny, overlap=overlap, **DRAFTS))

    def test_resumed(self, tiny: Subject) -> None:
        check(tiny, run(tiny.driven, tiny.requests(11), **DRAFTS), 11)

    @pytest.mark.parametrize("overlap", [False, True])
    def test_log_probabilities(self, tiny: Subject, overlap: bool) -> None:
        def asked() -> list[Request]:
            return [replace(one, params=replace(one.params, logprobs=3)) for one in tiny.requests()]

        plain = run(tiny.driven, asked())
        outcome = run(tiny.driven, asked(), overlap=overlap, **DRAFTS)
        check(tiny, outcome)
        for name in tiny.alone:
            assert outcome.outputs[name].logprobs == plain.outputs[name].logprobs, name

    def test_stop_tokens_and_the_least_length(self, tiny: Subject) -> None:
        """An answer that may end with any token it has ends where it does without drafts."""
        for name, prompt, params in cases(tiny.prompts):
            written = tiny.alone[name]
            for min_tokens in (0, 10, 25):
                one = request(name, prompt, NUM_TOKENS, min_tokens=min_tokens, **params)
                one = replace(one, stop_token_ids=written[5:30:3])
                plain = run(tiny.driven, [one]).outputs[name]
                drafted = run(tiny.driven, [one], **DRAFTS).outputs[name]
                assert (drafted.token_ids, drafted.finish) == (plain.token_ids, plain.finish)
                assert len(plain.token_ids) > min_tokens

    def test_a_step_has_fewer_tokens_than_it_could(self, tiny: Subject) -> None:
        check(tiny, run(tiny.driven, tiny.requests(), speculates=True, max_speculative_tokens=9))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_count_drafted_tokens(
    driven: Driven, name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few tokens to choose from, a token more or less in the answer changes what follows."""
    bias = dict.fromkeys(range(12), 30.0)
    asked = request("r", [1, 2, 3], 60, temperature=temperature, seed=3, logit_bias=bias, **{name: 2.0})
    plain = run(driven, [asked]).tokens("r")
    foresee(monkeypatch, [asked.prompt_token_ids + plain])
    outcome = run(driven, [asked], **DRAFTS)
    assert outcome.tokens("r") == plain
    assert outcome.stats.accepted_tokens > 10


FAVOURED = {3: 30.0, 4: 30.0, 5: 30.0}


def test_with_adapters(driven: Driven, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = Adapter(name="style", number=1, path=str(save_adapter("llama3", tmp_path, seed=1)))
    asked = [replace(request("adapted", prompts()[1], 40), adapter=adapter), request("plain", prompts()[1], 40)]
    expected = {one.request_id: run(driven, [one]).tokens(one.request_id) for one in asked}
    assert expected["adapted"] != expected["plain"]
    foresee(monkeypatch, [prompts()[1] + tokens for tokens in expected.values()])
    outcome = run(driven, asked, **DRAFTS)
    assert {name: outcome.tokens(name) for name in expected} == expected
    assert outcome.stats.accepted_tokens > 10


@pytest.mark.parametrize(("flags", "expected"), [({}, False), ({"speculative": "ngram"}, True)])
def test_the_flag(tiny_directory: Callable[[str], Path], flags: dict[str, Any], expected: bool) -> None:
    options = ModelOptions(device="cpu", dtype="float32", image_model="none")
    config = Config(model=options, cache=CacheOptions(num_blocks=64), scheduler=SchedulerOptions(**flags))
    limits = Worker(config, resolve(str(tiny_directory("llama3")))).limits
    assert limits.speculates is expected
    assert limits.max_speculative_tokens > MAX_DRAFT


REPEATS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.4, "seed": 5, "top_p": 0.9},
    SAMPLED | {"seed": 5, "temperature": 0.2},
    {"temperature": 0.0, "presence_penalty": 1.0, "logit_bias": FAVOURED},
    {"temperature": 0.3, "seed": 9, "logit_bias": FAVOURED},
    {"temperature": 0.0, "logit_bias": FAVOURED},
)


@pytest.mark.parametrize("params", REPEATS, ids=lambda params: " ".join(params))
def test_looked_up_drafts(driven: Driven, params: dict[str, Any]) -> None:
    """A tiny model with few tokens to choose from goes in circles, and its own answer is what is looked up."""
    asked = [request(f"r{i}", prompt, 60, **params) for i, prompt in enumerate(prompts())]
    plain = run(driven, asked)
    for overlap in (False, True):
        drafted = run(driven, asked, overlap=overlap, **DRAFTS)
        assert {one.request_id: drafted.tokens(one.request_id) for one in asked} == {
            one.request_id: plain.tokens(one.request_id) for one in asked
        }
        if "logit_bias" in params:
            assert drafted.stats.accepted_tokens > 20


def test_under_the_reference_ops(driven: Driven) -> None:
    reference = under_reference(driven)
    asked = [request(f"r{i}", prompt, 60, logit_bias=FAVOURED) for i, prompt in enumerate(prompts())]
    plain, drafted = run(reference, asked), run(reference, asked, **DRAFTS)
    assert [drafted.tokens(one.request_id) for one in asked] == [plain.tokens(one.request_id) for one in asked]
    assert drafted.stats.accepted_tokens > 0


def test_the_cache_of_a_request_with_drafts_is_that_of_one_without(driven: Driven) -> None:
    """A second request goes on from the blocks that the first has left, right ones among rejected ones."""
    first = request("first", prompts()[1], 60, logit_bias=FAVOURED)
    whole = first.prompt_token_ids + run(driven, [first]).tokens("first")
    second = request("second", whole, 30)
    plain = run(driven, [second]).tokens("second")
    outcome = run(driven, [first], later=[(10**6, second)], **DRAFTS)
    assert outcome.tokens("second") == plain
    assert outcome.outputs["second"].cached_tokens == (len(whole) - 1) // 16 * 16


CHOICES = (3, 4, 5)
DRAFT = [4, 3]
NUM_SEEDS = 1200
TEMPERATURE = 2.0


class Constant(Oracle):
    """A drafter that knows nothing, and always drafts the same."""

    def draft(self, pending: int, most: int) -> list[int]:
        return DRAFT[: max(0, most)]


def next_probabilities(driven: Driven, tokens: tuple[int, ...]) -> list[float]:
    """The model's own probabilities of what may follow a prompt and some tokens of an answer."""
    with watched_logits() as seen:
        run(driven, [request("r", [*prompts()[0], *tokens], 1)])
    return (seen[0][0, list(CHOICES)].double() / TEMPERATURE).softmax(0).tolist()


def test_sampled_tokens_have_the_distribution_of_the_model(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of four tokens, of which the last three come from one step where the draft of the first two is right:
    how often each answer comes is compared with the product of the model's probabilities, by a chi-square test."""
    monkeypatch.setattr(cursors, "NgramDrafter", lambda tokens, prediction: Constant(tokens, [], random.Random(0)))
    params = {"temperature": TEMPERATURE, "logit_bias": dict.fromkeys(CHOICES, 90.0)}
    asked = [request(str(seed), prompts()[0], 4, seed=seed, **params) for seed in range(NUM_SEEDS)]
    counts, drafted, accepted = Counter[tuple[int, ...]](), 0, 0
    for first in range(0, NUM_SEEDS, 10):
        outcome = run(driven, asked[first : first + 10], num_blocks=33, **DRAFTS)
        counts.update(tuple(output.token_ids) for output in outcome.outputs.values())
        drafted += outcome.stats.draft_tokens
        accepted += outcome.stats.accepted_tokens
    assert drafted > NUM_SEEDS and 0.1 < accepted / drafted < 0.9

    expected = {(): 1.0}
    for _ in range(4):
        expected = {
            (*tokens, choice): probability * share
            for tokens, probability in expected.items()
            for choice, share in zip(CHOICES, next_probabilities(driven, tokens), strict=True)
        }
    assert counts.keys() <= expected.keys()

    def chi_square(probabilities: dict[tuple[int, ...], float]) -> float:
        return sum(
            (counts[answer] - NUM_SEEDS * share) ** 2 / (NUM_SEEDS * share) for answer, share in probabilities.items()
        )

    assert min(expected.values()) * NUM_SEEDS > 3, "too few of an answer to say anything"
    # One of a thousand fair samples is above this (Wilson and Hilferty's approximation).
    freedom = len(expected) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square(expected) < limit
    assert chi_square(dict.fromkeys(expected, 1 / len(expected))) > 1.5 * limit, "the test tells distributions apart"
