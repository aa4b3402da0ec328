"""Log probabilities and vectors of prompts on a GPU: the CPU reference's, whatever else is in their steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests import tiny_models
from tests.gpu.test_engine import PROMPTS, forbid_waiting, on_gpu, work
from tests.worker.driving import Outcome, load, request, run, under_reference
from weft.types import Pooling, Request

pytestmark = pytest.mark.gpu


def extras() -> list[Request]:
    scored = [request(f"scored {i}", prompt, 4, prompt_logprobs=3) for i, prompt in enumerate(PROMPTS)]
    pooled = [
        replace(request(f"{pooling} {i}", prompt, 1), pooling=pooling)
        for i, prompt in enumerate(PROMPTS)
        for pooling in Pooling
    ]
    return scored + pooled


def assert_same(got: Outcome, expected: Outcome) -> None:
    for one in extras():
        ours, theirs = got.outputs[one.request_id], expected.outputs[one.request_id]
        assert (ours.finish, ours.error) == (theirs.finish, "")
        if one.pooling is None:
            assert ours.prompt_logprobs is not None and theirs.prompt_logprobs is not None
            for a, b in zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True):
                assert abs(a.logprob - b.logprob) < 1e-3
                np.testing.assert_allclose([value for _, value in a.top], [value for _, value in b.top], atol=1e-3)
        else:
            assert ours.embedding is not None and theirs.embedding is not None
            ours_vector, theirs_vector = (np.frombuffer(o.embedding, np.float32) for o in (ours, theirs))
            np.testing.assert_allclose(ours_vector, theirs_vector, atol=1e-4)


@pytest.mark.parametrize("name", tiny_models.SPECS)
def test_they_are_the_cpu_references(name: str, tmp_path: Path) -> None:
    folder = tiny_models.save_directory(name, tmp_path / name)
    reference = under_reference(load(folder))
    expected = run(reference, extras())
    tokens = run(reference, work()).outputs
    gpu = on_gpu(folder)
    while gpu.runner.prepare():
        pass
    conditions = ({}, {"overlap": True}, {"max_prefill_chunk": 7}, {"force_preempt_every": 3, "overlap": True})
    for condition in conditions:
        got = run(gpu, [*extras(), *work()], **condition)
        assert_same(got, expected)
        for request_id, output in tokens.items():
            assert got.tokens(request_id) == output.token_ids, f"{request_id} under {condition}"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_their_steps_wait_for_nothing(tmp_path: Path) -> None:
    gpu = on_gpu(tiny_models.save_directory("llama3", tmp_path / "llama3"))
    while gpu.runner.prepare():
        pass
    run(gpu, extras())
    forbid_waiting(gpu)
    run(gpu, [*extras(), *work()], overlap=True)
