"""A draft model changes no token, whatever it guesses; its cache is right wherever its guesses would tell otherwise."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.text.grammars.grammar_maker import grammars
from tests.tiny_adapters import save_adapter
from tests.tiny_models import END_OF_TURN, VOCAB_SIZE, noisy_copy, tokenizer_json
from tests.worker.driving import Outcome, load, request, run
from tests.worker.subjects import AFTER_THE_FIRST, Subject, alone, strangers, tiny_pool
from weft.errors import ConfigError
from weft.text.grammars.specs import RegexSpec, vocabulary_of
from weft.text.tokenizer import Tokenizer
from weft.types import Adapter, Request, TextAssets

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 32
MODEL = "llama3"
ROOM = {"max_speculative_tokens": 40}


def prompts() -> list[list[int]]:
    return [[(a * i + b) % VOCAB_SIZE for i in range(n)] for a, b, n in ((7, 1, 5), (31, 2, 60), (11, 3, 120))]


@pytest.fixture(scope="module")
def plain(tiny_directory: Callable[[str], Path]) -> Subject:
    """The requests without drafts."""
    return alone(load(tiny_directory(MODEL), num_blocks=256), prompts(), NUM_TOKENS)


def drafted(plain: Subject, model: Path, draft: Path) -> Subject:
    return replace(plain, driven=load(model, num_blocks=256, draft=draft))


@pytest.fixture(scope="module")
def equal(plain: Subject, tiny_directory: Callable[[str], Path]) -> Subject:
    """The model drafts for itself."""
    return drafted(plain, tiny_directory(MODEL), tiny_directory(MODEL))


@pytest.fixture(scope="module")
def near(plain: Subject, tiny_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Its weights with some noise draft for it: many guesses are right, and many are not."""
    return drafted(plain, tiny_directory(MODEL), noisy_copy(tiny_directory(MODEL), tmp_path_factory.mktemp("near")))


@pytest.fixture(scope="module")
def other(plain: Subject, tiny_directory: Callable[[str], Path]) -> Subject:
    """A model of another shape drafts, which knows nothing."""
    return drafted(plain, tiny_directory(MODEL), tiny_directory("smollm2"))


def check_equal(subject: Subject, outcome: Outcome, done: int = 0) -> None:
    subject.check(outcome, done)
    assert outcome.stats.accepted_tokens == outcome.stats.draft_tokens > 50


def check_near(subject: Subject, outcome: Outcome, done: int = 0) -> None:
    subject.check(outcome, done)
    assert 20 < outcome.stats.accepted_tokens < outcome.stats.draft_tokens


@pytest.mark.parametrize(
    ("name", "check", "overlap"),
    [("equal", check_equal, False), ("equal", check_equal, True), ("near", check_near, True)],
    ids=["equal", "equal and overlapped", "near and overlapped"],
)
class TestEveryWay:
    """All of what the model drafts for itself is right, greedy and sampled: its cache is right as well."""

    @pytest.fixture
    def subject(self, name: str, request: pytest.FixtureRequest) -> Subject:
        return request.getfixturevalue(name)

    def test_together(self, subject: Subject, check: Callable[..., None], overlap: bool) -> None:
        check(subject, run(subject.driven, subject.requests(), overlap=overlap, **ROOM))

    def test_with_strangers_in_chunks(self, subject: Subject, check: Callable[..., None], overlap: bool) -> None:
        """A draft model that is behind by more than a chunk catches up over several steps."""
        later = [(when, replace(one, params=replace(one.params, speculative=False))) for when, one in strangers(5, 20)]
        check(
            subject, run(subject.driven, subject.requests(), later=later, max_prefill_chunk=7, overlap=overlap, **ROOM)
        )

    def test_preempted(self, subject: Subject, check: Callable[..., None], overlap: bool) -> None:
        outcome = run(subject.driven, subject.requests(), force_preempt_every=2, overlap=overlap, **ROOM)
        check(subject, outcome)
        assert outcome.stats.preemptions > 3

    def test_preempted_by_a_tiny_pool(self, subject: Subject, check: Callable[..., None], overlap: bool) -> None:
        check(subject, tiny_pool(subject, overlap=overlap, **ROOM))

    def test_resumed(self, subject: Subject, check: Callable[..., None], overlap: bool) -> None:
        check(subject, run(subject.driven, subject.requests(11), overlap=overlap, **ROOM), 11)

    def test_behind_a_cached_prompt(self, subject: Subject, check: Callable[..., None], overlap: bool) -> None:
        """Blocks of the first requests are found by the second, with what the draft model has of them."""
        later = [(AFTER_THE_FIRST, replace(one, request_id=f"{one.request_id} again")) for one in subject.requests()]
        outcome = run(subject.driven, subject.requests(), later=later, overlap=overlap, **ROOM)
        check(subject, outcome)
        for name, tokens in subject.alone.items():
            assert outcome.tokens(f"{name} again") == tokens
        assert outcome.outputs["greedy 2 again"].cached_tokens > 100

    def test_behind_blocks_that_were_not_drafted(
        self, subject: Subject, check: Callable[..., None], overlap: bool
    ) -> None:
        first = [replace(one, params=replace(one.params, speculative=False)) for one in subject.requests()]
        later = [(AFTER_THE_FIRST, replace(one, request_id=f"{one.request_id} again")) for one in subject.requests()]
        outcome = run(subject.driven, first, later=later, overlap=overlap, **ROOM)
        check(subject, outcome)
        for name, tokens in subject.alone.items():
            assert outcome.tokens(f"{name} again") == tokens

    def test_log_probabilities(
        self, subject: Subject, check: Callable[..., None], overlap: bool, plain: Subject
    ) -> None:
        def asked() -> list[Request]:
            return [replace(one, params=replace(one.params, logprobs=3)) for one in subject.requests()]

        expected = run(plain.driven, asked())
        outcome = run(subject.driven, asked(), overlap=overlap, **ROOM)
        check(subject, outcome)
        for name in subject.alone:
            assert outcome.outputs[name].logprobs == expected.outputs[name].logprobs, name


def test_a_model_that_knows_nothing_is_soon_left_alone(other: Subject) -> None:
    outcome = run(other.driven, other.requests(), **ROOM)
    other.check(outcome)
    assert outcome.stats.accepted_tokens < 10
    assert outcome.stats.draft_tokens < 0.4 * outcome.stats.generation_tokens
    longer = request("r", prompts()[1], 180)
    stats = run(other.driven, [longer], **ROOM).stats
    assert stats.draft_tokens <= 2 * 7, "behind each failure there is a pause that is twice as long"


def test_with_a_draft_the_answer_takes_fewer_steps(equal: Subject, plain: Subject) -> None:
    one = request("r", prompts()[1], 100)
    without, with_drafts = run(plain.driven, [one]), run(equal.driven, [one], **ROOM)
    assert with_drafts.tokens("r") == without.tokens("r")
    assert with_drafts.stats.steps < without.stats.steps / 4


def test_a_draft_model_with_another_vocabulary_is_refused(
    tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_directory(MODEL), tmp_path / "small")
    config = tmp_path / "small" / "config.json"
    config.write_text(config.read_text().replace(f'"vocab_size": {VOCAB_SIZE}', f'"vocab_size": {VOCAB_SIZE - 1}'))
    with pytest.raises(ConfigError, match=f"--speculative-model small has {VOCAB_SIZE - 1} logits.* has {VOCAB_SIZE}"):
        load(tiny_directory(MODEL), draft=tmp_path / "small")


def test_with_adapters(equal: Subject, tmp_path: Path) -> None:
    """The draft model knows no adapters: its guesses are worse, and the answer is the adapter's."""
    adapter = Adapter(name="style", number=1, path=str(save_adapter(MODEL, tmp_path, seed=1)))
    asked = [replace(request("adapted", prompts()[1], 40), adapter=adapter), request("plain", prompts()[1], 40)]
    expected = [run(equal.driven, [one], speculates=False).tokens(one.request_id) for one in asked]
    outcome = run(equal.driven, asked, **ROOM)
    assert [outcome.tokens(one.request_id) for one in asked] == expected
    assert expected[0] != expected[1]


def test_with_grammars(equal: Subject) -> None:
    """The draft model guesses what it likes, and the grammar refuses most of it."""
    assets = TextAssets(kind="json", tokenizer_json=tokenizer_json(), eos_token_ids=[END_OF_TURN])
    tokenizer = Tokenizer.from_assets(assets)
    words = vocabulary_of(tokenizer)
    equal.driven.runner.constraints.learn(words.tokens, words.special_ids, words.eos_token_ids, VOCAB_SIZE)
    (grammar,) = grammars(tokenizer, [RegexSpec(pattern="([a-z]{2,4}[0-9] ){6}")])
    asked = [
        replace(request(str(i), prompt, 60, grammar=grammar), stop_token_ids=[END_OF_TURN])
        for i, prompt in enumerate(prompts())
    ]
    expected = [run(equal.driven, [one], speculates=False).tokens(one.request_id) for one in asked]
    for overlap in (False, True):
        outcome = run(equal.driven, asked, overlap=overlap, **ROOM)
        assert [outcome.tokens(one.request_id) for one in asked] == expected
        assert outcome.stats.draft_tokens > 0


@pytest.mark.parametrize("speculative", [None, True, False])
def test_the_flag(equal: Subject, speculative: bool | None) -> None:
    limits = equal.driven.limits
    assert limits.speculates and limits.has_draft_model
    stats = run(equal.driven, [request("r", prompts()[0], 20, speculative=speculative)]).stats
    assert (stats.draft_tokens > 0) == (speculative is not False)


def test_its_cache_is_planned_for(tiny_directory: Callable[[str], Path]) -> None:
    def blocks(**more: Any) -> int:
        return load(tiny_directory(MODEL), num_blocks=0, kv_cache_memory_mb=4, **more).limits.num_blocks

    assert blocks() == 2 * blocks(draft=tiny_directory(MODEL))
