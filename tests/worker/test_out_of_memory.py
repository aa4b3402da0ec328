"""A real worker that has no memory for a step: rows and cache are as if the step had never been planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.driving import Driven, load, request, run
from weft.types import Request

pytestmark = pytest.mark.usefixtures("one_thread")

FAILING = (2, 9, 10)
SEEDED = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2}


@pytest.fixture(scope="module")
def driven(tiny_directory: Callable[[str], Path]) -> Driven:
    return load(tiny_directory("qwen3"))


def work() -> list[Request]:
    prompts = [[5, 9, 200, 31], list(range(3, 60)), [7] * 33, [250, 1, 17, 99, 4] * 9]
    greedy = [request(f"greedy{i}", prompt, 24) for i, prompt in enumerate(prompts)]
    return greedy + [request(f"seeded{i}", prompt, 24, seed=i, **SEEDED) for i, prompt in enumerate(prompts)]


def failing(function: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter(range(10**6))

    def poor(*arguments: Any) -> Any:
        if next(calls) in FAILING:
            raise torch.OutOfMemoryError("the test took it all")
        return function(*arguments)

    return poor


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("place", ["launch", "model", "sampler"])
def test_nobodys_tokens_change(driven: Driven, place: str, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(driven, work()).outputs
    runner = driven.runner
    owner, name = {
        "launch": (runner, "execute"),
        "model": (runner.stepper, "step"),
        "sampler": (runner, "_sampled"),
    }[place]
    monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    outcome = run(driven, work(), overlap=overlap)
    assert {name: output.token_ids for name, output in outcome.outputs.items()} == {
        name: output.token_ids for name, output in expected.items()
    }
    assert outcome.stats.preemptions >= len(FAILING)
