"""Images on a GPU: the CPU's but for rounding, whatever else is in their steps, and nobody waits for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests import tiny_models
from tests.gpu.test_engine import forbid_waiting, work
from tests.tiny_images import save_image_model
from tests.worker.driving import Driven, Outcome, load, run
from tests.worker.test_denoise import WIDTH, images
from weft.hub.resolve import resolve
from weft.options import CacheOptions, Config, ModelOptions, SchedulerOptions
from weft.types import FinishReason
from weft.worker.worker import Worker

pytestmark = pytest.mark.gpu


def on_gpu(folder: Path, image_model: Path, dtype: str = "float32") -> Driven:
    worker = Worker(
        Config(
            model=ModelOptions(device="cuda", dtype=dtype, max_model_len=256, image_model=str(image_model)),
            cache=CacheOptions(num_blocks=128),
            scheduler=SchedulerOptions(max_num_seqs=12),
        ),
        resolve(str(folder)),
    )
    return Driven(worker.runner, worker.limits)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    here = tmp_path_factory.mktemp("images")
    return tiny_models.save_directory("smollm2", here / "smollm2"), save_image_model(here / "dit", WIDTH)


@pytest.fixture(scope="module")
def on_cpu(folders: tuple[Path, Path]) -> Outcome:
    return run(load(folders[0], image_model=folders[1]), images())


def assert_same(got: Outcome, expected: Outcome, most: int) -> None:
    for one in images():
        ours, theirs = got.outputs[one.request_id], expected.outputs[one.request_id]
        assert ours.finish is FinishReason.STOP and not ours.error
        assert ours.denoise_steps == list(range(1, one.image.steps + 1)) and ours.images.keys() == theirs.images.keys()
        for step, pixels in theirs.images.items():
            a, b = (np.frombuffer(bytes_, np.uint8).astype(int) for bytes_ in (ours.images[step], pixels))
            assert np.abs(a - b).max() <= most, one.request_id


CONDITIONS = ({}, {"overlap": True}, {"max_prefill_chunk": 7, "force_preempt_every": 3, "overlap": True})


def test_they_are_the_cpus_but_for_rounding(folders: tuple[Path, Path], on_cpu: Outcome) -> None:
    gpu = on_gpu(*folders)
    for condition in CONDITIONS:
        assert_same(run(gpu, images(), **condition), on_cpu, 2)


def test_beside_tokens_neither_changes(folders: tuple[Path, Path], on_cpu: Outcome) -> None:
    gpu = on_gpu(*folders)
    while gpu.runner.prepare():
        pass
    tokens = run(gpu, work()).outputs
    for condition in CONDITIONS:
        got = run(gpu, [*images(), *work()], **condition)
        assert_same(got, on_cpu, 2)
        for name, output in tokens.items():
            assert got.tokens(name) == output.token_ids, f"{name} under {condition}"


def test_half_precision_draws_nearly_the_same(folders: tuple[Path, Path], on_cpu: Outcome) -> None:
    """Of random weights the pixels are noise, and may differ much in places; on average they must not."""
    got = run(on_gpu(*folders, dtype="bfloat16"), images())
    for one in images():
        ours, theirs = (
            np.frombuffer(outcome.outputs[one.request_id].images[one.image.steps], np.uint8).astype(int)
            for outcome in (got, on_cpu)
        )
        assert np.abs(ours - theirs).mean() < 16, one.request_id


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_their_steps_wait_for_nothing(folders: tuple[Path, Path]) -> None:
    gpu = on_gpu(*folders)
    while gpu.runner.prepare():
        pass
    run(gpu, [*images(), *work()])
    forbid_waiting(gpu)
    run(gpu, [*images(), *work()], overlap=True)


def test_their_memory_is_in_the_ledger(folders: tuple[Path, Path]) -> None:
    config = Config(
        model=ModelOptions(device="cuda", dtype="float32", max_model_len=256, image_model=str(folders[1])),
        cache=CacheOptions(num_blocks=128),
    )
    worker = Worker(config, resolve(str(folders[0])))
    denoiser = worker.runner.denoiser
    assert denoiser is not None
    assert worker.info.memory.weights == worker.runner.stepper.model.weights.num_bytes + denoiser.num_bytes
