"""Prompt embeds in a real worker: a text's own embeddings in the place of its tokens give exactly the text's answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from tests.worker.driving import Driven, load, request, run, under_reference, watched_logits
from tests.worker.test_prompt_embeds import embeds
from weft.payloads import PromptEmbeds
from weft.types import FinishReason, MixedPrompt, Request

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [(7 * i) % 200 + 3 for i in range(45)]
PARTS = {
    "whole": [(0, 45)],
    "beginning": [(0, 20)],
    "end": [(17, 45)],
    "middle": [(5, 33)],
    "one row": [(16, 17)],
    "last row": [(44, 45)],
    "several": [(1, 2), (3, 20), (20, 21), (30, 44)],
}
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def driven(tiny_directory: Callable[[str], Path]) -> Driven:
    loaded = load(tiny_directory("smollm2"), num_blocks=64)
    width = loaded.runner.stepper.model.config.hidden_size
    return Driven(loaded.runner, replace(loaded.limits, embeds_width=width, max_embedding_bytes=1 << 20))


@pytest.fixture(scope="module")
def expected(driven: Driven) -> list[int]:
    return run(driven, [request("ids", PROMPT, MAX_TOKENS)]).tokens("ids")


def rows_of(driven: Driven, token_ids: list[int]) -> Tensor:
    return driven.runner.stepper.model.weights.embedding[token_ids].cpu()


def mixed(driven: Driven, places: list[tuple[int, int]], dtype: str = "float32", change: float = 0) -> MixedPrompt:
    """The prompt with its embeddings in these places."""
    parts: list[list[int] | PromptEmbeds] = []
    at = 0
    for start, stop in places:
        parts += [PROMPT[at:start], embeds(rows_of(driven, PROMPT[start:stop]) + change, dtype)]
        at = stop
    return MixedPrompt.of([*parts, PROMPT[at:]])


def asked(name: str, prompt: MixedPrompt, max_tokens: int = MAX_TOKENS, **params: Any) -> Request:
    return replace(request(name, prompt.token_ids, max_tokens, **params), embeds=prompt.embeds)


@pytest.mark.parametrize("chunk", [1, 7, 256])
@pytest.mark.parametrize("name", PARTS)
def test_a_texts_embeddings_are_the_text(driven: Driven, expected: list[int], name: str, chunk: int) -> None:
    outcome = run(driven, [asked("r", mixed(driven, PARTS[name]))], max_prefill_chunk=chunk)
    assert outcome.tokens("r") == expected
    assert outcome.stats.embedding_bytes == 0


def test_the_logits_are_the_same_to_the_last_bit(driven: Driven) -> None:
    with watched_logits() as of_ids:
        run(driven, [request("ids", PROMPT, MAX_TOKENS)])
    with watched_logits() as of_rows:
        run(driven, [asked("rows", mixed(driven, PARTS["several"]))])
    assert all(map(torch.equal, of_ids, of_rows))


@pytest.mark.parametrize("overlap", [False, True])
def test_in_company_preempted_and_in_used_rows(driven: Driven, expected: list[int], overlap: bool) -> None:
    others = [request(f"o{i}", [3 + i] * (5 * i + 2), 20, temperature=i % 2, seed=i) for i in range(5)]
    alone = [run(driven, [other]).tokens(other.request_id) for other in others]
    with_rows = [asked(name, mixed(driven, places)) for name, places in PARTS.items()]
    later = [(3 * i, one) for i, one in enumerate(with_rows)]
    limits = {"max_num_seqs": 3, "max_prefill_chunk": 16, "max_num_batched_tokens": 24, "force_preempt_every": 3}
    outcome = run(driven, others, later=later, overlap=overlap, **limits)
    assert [outcome.tokens(one.request_id) for one in with_rows] == [expected] * len(with_rows)
    assert [outcome.tokens(other.request_id) for other in others] == alone
    assert outcome.stats.preemptions > 0 and outcome.stats.embedding_bytes == 0


def test_equal_rows_are_found_in_the_cache_and_others_are_not(driven: Driven, expected: list[int]) -> None:
    first, again = (asked(name, mixed(driven, PARTS["middle"])) for name in ("first", "again"))
    other = asked("other", mixed(driven, PARTS["middle"], change=0.5))
    ids = request("ids", PROMPT, MAX_TOKENS)
    outcome = run(driven, [first], later=[(40, again), (80, other), (120, ids)])
    assert [outcome.outputs[name].cached_tokens for name in ("first", "again", "other", "ids")] == [0, 32, 0, 0]
    assert outcome.tokens("first") == outcome.tokens("again") == outcome.tokens("ids") == expected
    assert outcome.tokens("other") != expected, "the rows mean nothing"
    assert run(driven, [other]).tokens("other") == outcome.tokens("other")


def test_resumed_with_tokens_that_the_user_has(driven: Driven, expected: list[int]) -> None:
    whole = asked("r", mixed(driven, PARTS["several"]))
    assert run(driven, [replace(whole, output_token_ids=expected[:5])]).tokens("r") == expected[5:]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_smaller_types_are_the_values_that_they_stand_for(driven: Driven, dtype: str) -> None:
    rounded = rows_of(driven, PROMPT).to(getattr(torch, dtype)).float()
    large = asked("large", MixedPrompt.of([embeds(rounded)]))
    small = asked("small", MixedPrompt.of([embeds(rounded, dtype)]))
    assert run(driven, [small]).tokens("small") == run(driven, [large]).tokens("large")


@pytest.mark.parametrize("name", ["whole", "several"])
def test_the_torch_path_takes_them_as_well(driven: Driven, name: str) -> None:
    plain = under_reference(driven)
    expected = run(plain, [request("ids", PROMPT, MAX_TOKENS)]).tokens("ids")
    assert run(plain, [asked("r", mixed(plain, PARTS[name]))], max_prefill_chunk=16).tokens("r") == expected


PENALTIES = {"repetition_penalty": 1.8, "presence_penalty": 1.0, "frequency_penalty": 0.5}


def test_penalties_count_token_ids_and_no_rows(driven: Driven) -> None:
    """The same rows, once behind the ids that stand in them and once behind none: what is penalised differs."""
    alone, mixed_in = mixed(driven, [(0, 45)]), mixed(driven, [(1, 45)])
    answers = run(driven, [asked("no id", alone, **PENALTIES), asked("one id", mixed_in, **PENALTIES)])
    assert all(output.finish is FinishReason.LENGTH for output in answers.outputs.values())
    with watched_logits() as logits:
        [first] = run(driven, [asked("first", alone, 1, repetition_penalty=1.8)]).tokens("first")
    assert first == logits[0][0].argmax(), "no token is repeated yet"
    biased = {int(logits[0][0].argmax()): -100.0}
    [second] = run(driven, [asked("x", alone, 1, repetition_penalty=1.8, logit_bias=biased)]).tokens("x")
    assert second == logits[0][0].topk(2).indices[1]


def test_values_that_overflow_end_their_request_alone(driven: Driven, expected: list[int]) -> None:
    width = driven.limits.embeds_width
    huge = asked("huge", MixedPrompt.of([PROMPT[:16], embeds(torch.full((20, width), 3e38))]))
    beside = request("ids", PROMPT, MAX_TOKENS)
    outcome = run(driven, [huge, beside], later=[(60, replace(beside, request_id="later"))])
    assert outcome.tokens("ids") == outcome.tokens("later") == expected
    assert outcome.outputs["huge"].finish is not None
