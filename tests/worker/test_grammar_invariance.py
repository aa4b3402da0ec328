"""A request with a grammar gives the same tokens alone, in company, in pieces, preempted, resumed or read late; and
requests without one beside it give theirs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from tests.text.grammars.grammar_maker import grammars
from tests.tiny_models import END_OF_TURN, VOCAB_SIZE, tokenizer_json
from tests.worker.driving import Driven, Outcome, load, request, run
from tests.worker.subjects import SAMPLED
from tests.worker.test_speculation import foresee
from weft.text.grammars.specs import ChoiceSpec, JsonSchemaSpec, RegexSpec, vocabulary_of
from weft.text.tokenizer import Tokenizer
from weft.types import FinishReason, Request, TextAssets

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMA = {
    "type": "array",
    "items": {"type": "string", "minLength": 3, "maxLength": 6, "pattern": "^[a-z ]*$"},
    "minItems": 4,
    "maxItems": 4,
}
PATTERN = "([a-z]{2,4}[0-9] ){6}"
NUM_FREE_TOKENS = 30


class Served(Struct, frozen=True):
    driven: Driven
    tokenizer: Tokenizer
    requests: list[Request]
    alone: dict[str, list[int]]

    def check(self, outcome: Outcome, done: int = 0) -> None:
        for made in self.requests:
            name = made.request_id
            assert self.alone[name][:done] + outcome.tokens(name) == self.alone[name], name
            ended = FinishReason.STOP if made.params.grammar else FinishReason.LENGTH
            assert outcome.outputs[name].finish is ended

    def resumed(self, done: int) -> list[Request]:
        return [replace(made, output_token_ids=self.alone[made.request_id][:done]) for made in self.requests]

    def text(self, name: str) -> str:
        return self.tokenizer.decode(self.alone[name])


@pytest.fixture(scope="module")
def served(tiny_directory: Callable[[str], Path]) -> Served:
    assets = TextAssets(kind="json", tokenizer_json=tokenizer_json(), eos_token_ids=[END_OF_TURN])
    tokenizer = Tokenizer.from_assets(assets)
    schema, pattern, choice = grammars(
        tokenizer,
        [JsonSchemaSpec(schema=SCHEMA), RegexSpec(pattern=PATTERN), ChoiceSpec(options=["over and under", "overt"])],
    )
    driven = load(tiny_directory("llama3"), num_blocks=256)
    words = vocabulary_of(tokenizer)
    driven.runner.constraints.learn(words.tokens, words.special_ids, words.eos_token_ids, VOCAB_SIZE)
    requests = []
    for i, prompt in enumerate([[5, 9, 11], [(31 * j + 2) % VOCAB_SIZE for j in range(40)]]):
        kinds: list[tuple[str, dict[str, Any]]] = [("greedy", {}), ("sampled", SAMPLED | {"seed": 7 + i})]
        for kind, params in kinds:
            for form, grammar in (("schema", schema), ("pattern", pattern), ("choice", choice)):
                made = request(f"{kind} {form} {i}", prompt, 100, grammar=grammar, **params)
                requests.append(replace(made, stop_token_ids=[END_OF_TURN]))
            requests.append(request(f"{kind} free {i}", prompt, NUM_FREE_TOKENS, **params))
    alone = {made.request_id: run(driven, [made]).tokens(made.request_id) for made in requests}
    return Served(driven, tokenizer, requests, alone)


def test_alone_each_follows_its_grammar(served: Served) -> None:
    for made in served.requests:
        name = made.request_id
        if "schema" in name:
            assert all(re.fullmatch("[a-z ]{3,6}", word) for word in json.loads(served.text(name)))
        elif "pattern" in name:
            assert re.fullmatch(PATTERN, served.text(name))
        elif "choice" in name:
            assert served.text(name) in ("over and under", "overt")
        assert (served.alone[name][-1] == END_OF_TURN) == bool(made.params.grammar)
    assert served.alone["greedy schema 0"] != served.alone["sampled schema 0"]


@pytest.mark.parametrize("overlap", [False, True])
def test_in_one_batch(served: Served, overlap: bool) -> None:
    served.check(run(served.driven, served.requests, overlap=overlap, max_num_seqs=12))


def test_in_chunks(served: Served) -> None:
    served.check(run(served.driven, served.requests, max_prefill_chunk=7, overlap=True))


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_every_third_step(served: Served, overlap: bool) -> None:
    outcome = run(served.driven, served.requests, force_preempt_every=3, overlap=overlap)
    assert outcome.stats.preemptions > 6
    served.check(outcome)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("done", [1, 4])
def test_resumed(served: Served, done: int, overlap: bool) -> None:
    served.check(run(served.driven, served.resumed(done), overlap=overlap), done)


def test_resumed_in_chunks_and_then_preempted(served: Served) -> None:
    outcome = run(served.driven, served.resumed(3), max_prefill_chunk=7, force_preempt_every=3, overlap=True)
    served.check(outcome, 3)


def test_beside_requests_that_are_aborted(served: Served) -> None:
    """Their rows are given to others while steps that they were in are not yet read."""
    later = [
        (when, replace(served.requests[0], request_id=f"gone {when}", cache_salt=str(when))) for when in (1, 3, 5, 9)
    ]
    aborts = [(when + 3, f"gone {when}") for when in (1, 3, 5, 9)]
    for overlap in (False, True):
        served.check(run(served.driven, served.requests, later=later, aborts=aborts, overlap=overlap, max_num_seqs=5))


def test_log_probabilities_are_the_models_own(served: Served) -> None:
    """They leave room for tokens that the grammar ruled out."""
    name = "greedy choice 0"
    made = next(made for made in served.requests if made.request_id == name)
    asked = replace(made, params=replace(made.params, logprobs=5))
    outcome = run(served.driven, [asked])
    assert outcome.tokens(name) == served.alone[name]
    firsts = outcome.outputs[name].logprobs[0]
    assert firsts.logprob < firsts.top[0][1], "the likeliest token was not allowed"
    assert outcome.tokens(name)[0] not in [token for token, _ in firsts.top[:1]]


DRAFTS = {"speculates": True, "max_speculative_tokens": 99}


@pytest.fixture
def foreseen(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are right up to random places, and then often such as the grammar refuses."""
    foresee(monkeypatch, [made.prompt_token_ids + served.alone[made.request_id] for made in served.requests])


@pytest.mark.usefixtures("foreseen")
class TestWithDrafts:
    def check(self, served: Served, outcome: Outcome, done: int = 0) -> None:
        served.check(outcome, done)
        assert 20 < outcome.stats.accepted_tokens < outcome.stats.draft_tokens

    @pytest.mark.parametrize("overlap", [False, True])
    def test_in_one_batch(self, served: Served, overlap: bool) -> None:
        self.check(served, run(served.driven, served.requests, overlap=overlap, max_num_seqs=12, **DRAFTS))

    @pytest.mark.parametrize("overlap", [False, True])
    def test_preempted_every_second_step(self, served: Served, overlap: bool) -> None:
        outcome = run(served.driven, served.requests, force_preempt_every=2, overlap=overlap, **DRAFTS)
        assert outcome.stats.preemptions > 6
        self.check(served, outcome)

    @pytest.mark.parametrize("overlap", [False, True])
    def test_resumed_in_chunks(self, served: Served, overlap: bool) -> None:
        self.check(served, run(served.driven, served.resumed(3), max_prefill_chunk=7, overlap=overlap, **DRAFTS), 3)

    def test_alone(self, served: Served) -> None:
        for made in served.requests:
            outcome = run(served.driven, [made], **DRAFTS)
            assert outcome.tokens(made.request_id) == served.alone[made.request_id]
            assert not made.params.grammar or outcome.stats.draft_tokens > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_with_drafts_that_were_looked_up(served: Served, overlap: bool) -> None:
    """An answer that must repeat itself is drafted from itself."""
    (grammar,) = grammars(served.tokenizer, [RegexSpec(pattern="(abc1 ){12}")])
    asked = [replace(request(f"r{i}", [5, i], 100, grammar=grammar), stop_token_ids=[END_OF_TURN]) for i in range(3)]
    plain, drafted = run(served.driven, asked), run(served.driven, asked, overlap=overlap, **DRAFTS)
    for one in asked:
        assert drafted.tokens(one.request_id) == plain.tokens(one.request_id)
        assert drafted.outputs[one.request_id].finish is FinishReason.STOP
    assert drafted.stats.accepted_tokens > 20
    assert drafted.stats.steps < plain.stats.steps
