"""The sampler with a GPU's kernels: the tokens of the CPU, whatever the parameters, and nothing that waits.

TRITON_INTERPRET=1 runs what needs no device.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.gpu.steps import DEVICE, INTERPRETED

if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from tests.worker.targets import Target, draws, sample, sample_rows, table_of, target
from tests.worker.test_sampler import LOGITS, assert_distribution, kept, nucleus, softmax
from weft.kernels import REFERENCE, ops_for
from weft.kernels.sampling import gumbel_noise
from weft.plan import Sampled
from weft.types import SamplingParams
from weft.worker.sampler import warm_up_sampler

pytestmark = pytest.mark.gpu
needs_device = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")

OPS = ops_for("cuda")
CLOSE = 1e-5
VOCABULARIES = [300] if INTERPRETED else [300, 49_152, 151_936]
NUM_DRAWS = 200 if INTERPRETED else 20_000


def mixture(count: int, vocabulary: int) -> list[Target]:
    """Rows of every kind, no two of them alike."""
    rng = random.Random(vocabulary)

    def some(*values: float) -> float:
        return rng.choice(values)

    def row() -> Target:
        history = [rng.randrange(vocabulary) for _ in range(rng.randrange(2, 200))]
        return target(
            history,
            rng.randrange(1, len(history)),
            [rng.randrange(vocabulary) for _ in range(3)],
            temperature=some(0.0, 0.2, 0.7, 1.0, 1.5),
            top_k=int(some(0, 0, 1, 40, 1000, vocabulary)),
            top_p=some(1.0, 1.0, 0.95, 0.5),
            min_p=some(0.0, 0.0, 0.05, 1.0),
            seed=rng.randrange(-(2**63), 2**63),
            presence_penalty=some(0.0, 0.0, 1.0),
            frequency_penalty=some(0.0, 0.0, -0.5),
            repetition_penalty=some(1.0, 1.0, 1.2),
            logit_bias={rng.randrange(vocabulary): some(-100.0, 2.0, 8.0) for _ in range(rng.choice([0, 0, 1, 300]))},
            min_tokens=int(some(0, 0, 1000)),
            logprobs=rng.choice([None, None, 0, 5, 20]),
        )

    return [row() for _ in range(count)]


class Explained:
    """The reference's ops, which remember from what they chose."""

    def __init__(self) -> None:
        self.scores: Tensor | None = None
        self.ops = REFERENCE._replace(greedy=self._greedy, gumbel_sample=self._gumbel_sample)

    def _greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        self.scores = logits.clone()
        return REFERENCE.greedy(logits)

    def _gumbel_sample(
        self, logits: Tensor, peaks: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, least: Tensor
    ) -> Tensor:
        self.scores = logits.clone()
        ids = torch.arange(logits.shape[1])
        for i, temperature in enumerate(temperatures.tolist()):
            if temperature:
                noise = gumbel_noise(int(seeds[i]), int(positions[i]), ids)
                self.scores[i] = (logits[i] - peaks[i]) / temperature + noise
        return REFERENCE.gumbel_sample(logits, peaks, temperatures, seeds, positions, least)


def assert_same(found: Sampled, wanted: Sampled, scores: Tensor) -> None:
    # Where two scores are a rounding apart either token is right.
    assert abs(float(scores[found.token_id] - scores[wanted.token_id])) <= CLOSE, (found, wanted)
    assert (found.logprob is None) == (wanted.logprob is None)
    if found.logprob is not None and wanted.logprob is not None and found.token_id == wanted.token_id:
        assert found.logprob.logprob == pytest.approx(wanted.logprob.logprob, abs=1e-4)
        assert [token for token, _ in found.logprob.top] == [token for token, _ in wanted.logprob.top]
        values = [value for _, value in wanted.logprob.top]
        assert [value for _, value in found.logprob.top] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_tokens_are_the_cpus(vocabulary: int) -> None:
    logits = torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(1)) * 3
    targets, explained = mixture(64, vocabulary), Explained()
    wanted = sample(logits, targets, explained.ops).read()
    found = sample(logits.to(DEVICE), targets, OPS, stale=7).read()
    assert explained.scores is not None
    for mine, theirs, scores in zip(found, wanted, explained.scores, strict=True):
        assert_same(mine, theirs, scores)
    assert sum(mine.token_id == theirs.token_id for mine, theirs in zip(found, wanted, strict=True)) >= 62
    alone = [sample(logits[i : i + 1].to(DEVICE), targets[i : i + 1], OPS).read()[0] for i in range(16)]
    assert [one.token_id for one in alone] == [one.token_id for one in found[:16]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # The interpreter's, of inf - inf.
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_fails_alone(bad: float) -> None:
    logits = torch.randn(24, 300, device=DEVICE)
    targets = mixture(24, 300)
    sound = sample(logits, targets, OPS).read()
    logits[5, 17] = bad
    found = sample(logits, targets, OPS).read()
    assert found[5].error and found[5].token_id == -1
    assert found[:5] + found[6:] == sound[:5] + sound[6:]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_gives_its_distribution(temperature: float) -> None:
    tokens = draws(LOGITS.to(DEVICE), NUM_DRAWS, ops=OPS, temperature=temperature)
    assert_distribution(tokens, softmax(LOGITS, temperature))


def test_what_is_kept_is_drawn_as_before() -> None:
    probabilities = softmax(LOGITS)
    likeliest = set(np.argsort(-probabilities)[:3].tolist())
    for how, ids in (
        ({"top_k": 3}, likeliest),
        ({"top_p": 0.9}, nucleus(probabilities, 0.9)),
        ({"min_p": 0.1}, {i for i, p in enumerate(probabilities) if p >= 0.1 * probabilities.max()}),
    ):
        tokens = draws(LOGITS.to(DEVICE), NUM_DRAWS, ops=OPS, **how)
        assert_distribution(tokens, kept(probabilities, ids))


@needs_device
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_batch_of_everything_waits_for_nothing(dtype: torch.dtype) -> None:
    logits = torch.randn(64, 151_936, device=DEVICE).to(dtype)
    targets = mixture(64, 151_936)
    warm_up_sampler(logits, OPS)
    positions = [len(one.history) for one in targets]
    wanted = sample(logits, targets, OPS).read()
    table = table_of(targets, DEVICE.type)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(10**9)
        asleep = torch.cuda.Event()
        asleep.record()
        batch = sample_rows(logits, table, list(range(64)), positions, OPS)
        was_asleep = not asleep.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert was_asleep, "the device had to be done before the host went on"
    assert [one.token_id for one in batch.read()] == [one.token_id for one in wanted]
    assert table.tokens[list(range(64)), positions].tolist() == [one.token_id for one in wanted]


@needs_device
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_an_engine_of_every_parameter_waits_for_nothing(tmp_path: Path) -> None:
    from msgspec.structs import asdict, replace

    from tests import tiny_models
    from tests.gpu.test_engine import PROMPTS, forbid_waiting, on_gpu
    from tests.worker.driving import load, request, run, under_reference

    folder = tiny_models.save_directory("llama3", tmp_path / "llama3")
    kinds = [asdict(one.params) | {"min_tokens": 9} for one in mixture(12, tiny_models.VOCAB_SIZE)]
    requests = [
        replace(
            request(f"r{i}", PROMPTS[i % len(PROMPTS)], 24),
            params=SamplingParams(**kind | {"max_tokens": 24}),
            stop_token_ids=[3, 4],
        )
        for i, kind in enumerate(kinds)
    ]
    wanted = run(under_reference(load(folder)), requests)
    gpu = on_gpu(folder)
    while gpu.runner.prepare():
        pass
    run(gpu, requests)
    forbid_waiting(gpu)
    found = run(gpu, requests, overlap=True)
    assert {made.request_id: found.tokens(made.request_id) for made in requests} == {
        made.request_id: wanted.tokens(made.request_id) for made in requests
    }
