"""Parameters one by one on the way to vLLM, tokens and figures on the way back; with vLLM's fields, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weft.backends.vllm.sampling_params import VllmAnswer, prompt_of, sampling_of
from weft.errors import EngineFault
from weft.types import FinishReason, Request, SamplingParams, TokenLogprob


def request(delivered: tuple[int, ...] = (), **fields: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 10, **fields})
    return Request(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        params=params,
        stop_token_ids=[2, 9],
        output_token_ids=list(delivered),
    )


def test_every_parameter_has_its_own() -> None:
    asked = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {4: -100.0},
        "max_tokens": 10,
        "min_tokens": 2,
        "logprobs": 3,
        "prompt_logprobs": 1,
        "ignore_eos": True,
    }
    given = sampling_of(request(**asked))
    assert {name: given[name] for name in asked} == asked
    assert given["stop_token_ids"] == [2, 9]
    assert given["detokenize"] is False, "the text is made on this side"
    assert "stop" not in given, "and stop strings are found on this side"


def test_what_is_off_is_off_for_vllm() -> None:
    given = sampling_of(request())
    assert given["top_k"] == 0 and given["logit_bias"] is None and given["seed"] is None
    assert given["logprobs"] is None and given["prompt_logprobs"] is None


@pytest.mark.parametrize(("seed", "given"), [(0, 0), (5, 5), (-1, 2**63 - 1), (-(2**63), 0)])
def test_every_seed_is_one_to_vllm(seed: int, given: int) -> None:
    assert sampling_of(request(seed=seed))["seed"] == given


def test_a_greedy_answer_needs_no_generator() -> None:
    assert sampling_of(request(seed=5, temperature=0))["seed"] is None


def test_a_resumed_request_goes_on_behind_what_was_delivered() -> None:
    resumed = request((7, 8), seed=5, min_tokens=3, prompt_logprobs=2)
    assert prompt_of(resumed) == [1, 2, 3, 7, 8]
    given = sampling_of(resumed)
    assert given["max_tokens"] == 8 and given["min_tokens"] == 1
    assert given["prompt_logprobs"] is None, "the user has them"
    assert given["seed"] == 7, "not the draws of the beginning once more"


def test_a_form_cannot_be_resumed_in_its_middle() -> None:
    assert sampling_of(request(grammar="start: /a+/"))["max_tokens"] == 10
    with pytest.raises(EngineFault, match="structured"):
        sampling_of(request((7,), grammar="start: /a+/"))


def output(token_ids: list[int], **more: Any) -> Any:
    """As vLLM's RequestOutput."""
    completion = SimpleNamespace(
        token_ids=token_ids, finish_reason=more.pop("finish", None), logprobs=more.pop("logprobs", None)
    )
    fields = {"num_cached_tokens": 16, "metrics": None, "prompt_logprobs": None, **more}
    return SimpleNamespace(outputs=[completion], **fields)


def scored(logprob: float, rank: int) -> Any:
    return SimpleNamespace(logprob=logprob, rank=rank)


def test_only_the_first_event_tells_of_the_prompt() -> None:
    answer = VllmAnswer(request())
    times = SimpleNamespace(queued_ts=10.0, scheduled_ts=10.25)
    first, second = answer.event(output([5], metrics=times)), answer.event(output([6], metrics=times))
    assert (first.cached_tokens, first.queue_seconds) == (16, 0.25)
    assert (second.cached_tokens, second.queue_seconds) == (None, None)
    assert not first.is_plain and second.is_plain


@pytest.mark.parametrize(
    ("said", "reason", "stop_token"),
    [
        ("stop", FinishReason.STOP, 9),
        ("length", FinishReason.LENGTH, None),
        ("abort", FinishReason.ABORT, None),
        ("error", FinishReason.ERROR, None),
    ],
)
def test_how_it_ends(said: str, reason: FinishReason, stop_token: int | None) -> None:
    event = VllmAnswer(request()).event(output([9], finish=said))
    assert event.finish is reason and event.stop_token_id == stop_token
    assert bool(event.error) == (reason is FinishReason.ERROR)


def test_log_probabilities_are_the_chosen_tokens_and_the_likeliest_by_rank() -> None:
    table = {7: scored(-5.0, 40), 3: scored(-0.1, 1), 4: scored(-2.0, 2)}
    event = VllmAnswer(request(logprobs=2)).event(output([7], logprobs=[table]))
    assert event.logprobs == [TokenLogprob(-5.0, ((3, -0.1), (4, -2.0)))]
    alone = VllmAnswer(request(logprobs=0)).event(output([7], logprobs=[{7: scored(-5.0, 40)}]))
    assert alone.logprobs == [TokenLogprob(-5.0)]


def test_log_probabilities_of_a_prompt_are_of_all_its_tokens_but_the_first() -> None:
    tables = [None, {2: scored(-1.0, 1)}, {3: scored(-3.0, 2), 8: scored(-0.5, 1)}]
    event = VllmAnswer(request(prompt_logprobs=1)).event(output([7], prompt_logprobs=tables))
    assert event.prompt_logprobs == [TokenLogprob(-1.0, ((2, -1.0),)), TokenLogprob(-3.0, ((8, -0.5),))]
