"""Drafts on the GPU: the tokens without them, in graphs and in eager steps, with results one step late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.gpu.test_engine import PROMPTS, SEEDED, forbid_waiting, on_gpu
from tests.worker.driving import Driven, Outcome, request, run
from tests.worker.test_speculation import foresee
from weft.types import Request

pytestmark = pytest.mark.gpu

DRAFTS = {"speculates": True, "max_speculative_tokens": 40}


def work() -> list[Request]:
    greedy = [request(f"greedy{i}", prompt, 48) for i, prompt in enumerate(PROMPTS)]
    return greedy + [request(f"seeded{i}", prompt, 48, **SEEDED) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def gpu(tiny_directory: Callable[[str], Path]) -> Driven:
    gpu = on_gpu(tiny_directory("qwen3"))
    while gpu.runner.prepare():
        pass
    return gpu


@pytest.fixture
def plain(gpu: Driven, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """The outcome without drafts, known to every drafter from now on: half of what it drafts is right."""
    outcome = run(gpu, work())
    foresee(monkeypatch, [one.prompt_token_ids + outcome.tokens(one.request_id) for one in work()])
    return outcome


@pytest.mark.parametrize(
    "condition", [{}, {"overlap": True}, {"max_prefill_chunk": 7}, {"force_preempt_every": 3}], ids=str
)
@pytest.mark.parametrize("graphs", [True, False])
def test_drafts_change_no_token(
    graphs: bool, condition: dict[str, int], gpu: Driven, plain: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not graphs:
        monkeypatch.setattr(gpu.runner, "graphs", None)
    got = run(gpu, work(), **DRAFTS, **condition)
    assert {one.request_id: got.tokens(one.request_id) for one in work()} == {
        one.request_id: plain.tokens(one.request_id) for one in work()
    }
    assert 0 < got.stats.accepted_tokens < got.stats.draft_tokens


@pytest.mark.usefixtures("plain")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_with_drafts_waits_for_nothing(gpu: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.runner, "execute", gpu.runner.execute)
    run(gpu, work(), **DRAFTS, overlap=True)
    forbid_waiting(gpu)
    assert run(gpu, work(), **DRAFTS, overlap=True).stats.accepted_tokens > 0
