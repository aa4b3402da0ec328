"""A draft model on the GPU: the tokens without it, in graphs and in eager steps, with results one step late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from msgspec.structs import replace

from tests.gpu.test_engine import PROMPTS, SEEDED, forbid_waiting
from tests.tiny_models import noisy_copy
from tests.worker.driving import Driven, Outcome, request, run
from weft.hub.resolve import resolve
from weft.options import CacheOptions, Config, ModelOptions, SchedulerOptions
from weft.types import Request
from weft.worker.worker import Worker

pytestmark = pytest.mark.gpu

MODEL = "qwen3"
ROOM = {"max_speculative_tokens": 40}


def work() -> list[Request]:
    greedy = [request(f"greedy{i}", prompt, 48) for i, prompt in enumerate(PROMPTS)]
    return greedy + [request(f"seeded{i}", prompt, 48, **SEEDED) for i, prompt in enumerate(PROMPTS)]


def on_gpu(model: Path, draft: Path) -> Driven:
    options = ModelOptions(device="cuda", dtype="float32", max_model_len=256, speculative_model=str(draft))
    config = Config(model=options, cache=CacheOptions(num_blocks=128), scheduler=SchedulerOptions(max_num_seqs=12))
    worker = Worker(config, replace(resolve(str(model)), draft=resolve(str(draft))))
    while worker.runner.prepare():
        pass
    return Driven(worker.runner, worker.limits)


@pytest.fixture(scope="module")
def equal(tiny_directory: Callable[[str], Path]) -> Driven:
    return on_gpu(tiny_directory(MODEL), tiny_directory(MODEL))


@pytest.fixture(scope="module")
def near(tiny_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Driven:
    return on_gpu(tiny_directory(MODEL), noisy_copy(tiny_directory(MODEL), tmp_path_factory.mktemp("near")))


@pytest.fixture(scope="module")
def plain(equal: Driven) -> Outcome:
    return run(equal, work(), speculates=False)


@pytest.mark.parametrize(
    "condition", [{}, {"overlap": True}, {"max_prefill_chunk": 7}, {"force_preempt_every": 3}], ids=str
)
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(("name", "least", "most"), [("equal", 0.95, 1.0), ("near", 0.2, 0.99)])
def test_a_draft_model_changes_no_token(
    name: str,
    least: float,
    most: float,
    graphs: bool,
    condition: dict[str, int],
    plain: Outcome,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu: Driven = request.getfixturevalue(name)
    if not graphs:
        monkeypatch.setattr(gpu.runner, "graphs", None)
        monkeypatch.setattr(gpu.runner.draft_model, "graphs", None)
    got = run(gpu, work(), **ROOM, **condition)
    assert {one.request_id: got.tokens(one.request_id) for one in work()} == {
        one.request_id: plain.tokens(one.request_id) for one in work()
    }
    assert got.stats.draft_tokens > 50
    assert least <= got.stats.accepted_tokens / got.stats.draft_tokens <= most


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_drafting_waits_for_nothing(equal: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal.runner, "execute", equal.runner.execute)
    run(equal, work(), **ROOM, overlap=True)
    forbid_waiting(equal)
    assert run(equal, work(), **ROOM, overlap=True).stats.accepted_tokens > 50


def test_short_drafts_are_made_in_graphs(equal: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a draft that was right to its end, of which the draft model lacks the last token."""
    draft_model = equal.runner.draft_model
    assert draft_model is not None and draft_model.graphs is not None
    replay, step = draft_model.graphs.replay, draft_model.stepper.step
    replayed, eager = [], []
    monkeypatch.setattr(draft_model.graphs, "replay", lambda *of: replayed.append(of) or replay(*of))
    monkeypatch.setattr(draft_model.stepper, "step", lambda *of: eager.append(of) or step(*of))
    run(equal, work()[:2], **ROOM)
    assert len(eager) <= 2, "the two prompts"
    assert len(replayed) > 20
