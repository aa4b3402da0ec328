"""A model with requests for it, and ways to serve them that must not change what each of them gives."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from tests.worker.driving import Driven, Outcome, request, run
from weft.types import Request

GREEDY = {"temperature": 0.0}
SAMPLED = {
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 40,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
}
AFTER_THE_FIRST = 10**6
"""The number of no step: who arrives then arrives when the engine has nothing left to do."""


class Subject(Struct, frozen=True):
    """A model, prompts for it, and what each request gives when it runs alone."""

    driven: Driven
    prompts: list[list[int]]
    num_tokens: int
    alone: dict[str, list[int]]

    def requests(self, done: int = 0) -> list[Request]:
        """Every prompt, greedy and sampled; with `done` of its tokens delivered already."""
        return [
            request(name, prompt, self.num_tokens, done=self.alone.get(name, [])[:done], **params)
            for name, prompt, params in cases(self.prompts)
        ]

    def check(self, outcome: Outcome, done: int = 0) -> None:
        for name, tokens in self.alone.items():
            assert tokens[:done] + outcome.tokens(name) == tokens, name


def cases(prompts: list[list[int]]) -> list[tuple[str, list[int], dict[str, Any]]]:
    return [
        (f"{kind} {i}", prompt, params)
        for i, prompt in enumerate(prompts)
        for kind, params in (("greedy", GREEDY), ("sampled", SAMPLED | {"seed": 1000 + i}))
    ]


def alone(driven: Driven, prompts: list[list[int]], num_tokens: int) -> Subject:
    alone = {}
    for made in Subject(driven, prompts, num_tokens, {}).requests():
        alone[made.request_id] = run(driven, [made]).tokens(made.request_id)
        assert len(alone[made.request_id]) == num_tokens
    return Subject(driven, prompts, num_tokens, alone)


def strangers(count: int, num_tokens: int) -> list[tuple[int, Request]]:
    """Requests that come and go meanwhile, with prompts, parameters and lengths of their own."""
    return [
        (
            3 * i + 1,
            request(
                f"stranger {i}",
                [(13 * i + 5 * j) % 300 for j in range(3 + 11 * i)],
                max(1, num_tokens - 5 * i),
                temperature=0.5 * i,
                seed=i,
                logprobs=2,
            ),
        )
        for i in range(count)
    ]


def late_strangers(served: Subject) -> Outcome:
    return run(served.driven, served.requests(), later=strangers(3, served.num_tokens // 2), overlap=True)


def cached_chunks(served: Subject) -> Outcome:
    """In chunks of 7 tokens, after a request that left the longest prompt in the cache."""
    longest = max(served.prompts, key=len)
    later = [(AFTER_THE_FIRST, made) for made in served.requests()]
    outcome = run(served.driven, [request("first", longest, 1)], later=later, max_prefill_chunk=7)
    size = served.driven.limits.block_size
    of_longest = [outcome.outputs[name] for name, prompt, _ in cases(served.prompts) if prompt == longest]
    assert [output.cached_tokens for output in of_longest] == [(len(longest) - 1) // size * size] * 2
    return outcome


def preempted(served: Subject, **others: Any) -> Outcome:
    outcome = run(served.driven, served.requests(), force_preempt_every=3, **others)
    assert outcome.stats.preemptions > 6
    return outcome


def tiny_pool(served: Subject, **others: Any) -> Outcome:
    """Little more than the longest request alone has need of."""
    size = served.driven.limits.block_size
    longest = -(-max(len(prompt) + served.num_tokens for prompt in served.prompts) // size)
    outcome = run(served.driven, served.requests(), num_blocks=longest + 3, max_model_len=longest * size, **others)
    assert outcome.stats.preemptions > 0
    return outcome
