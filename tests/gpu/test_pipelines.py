"""Pipelines on a GPU: the CPU's images but for rounding, and steps that wait for nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("diffusers")

from tests import tiny_models
from tests.gpu.test_engine import work
from tests.gpu.test_images import on_gpu
from tests.tiny_pipelines import save_pipeline
from tests.worker.driving import Outcome, load, run
from tests.worker.test_pipelines import images
from weft.types import FinishReason

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["PixArtSigmaPipeline", "StableDiffusion3Pipeline"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    here = tmp_path_factory.mktemp("pipelines")
    return tiny_models.save_directory("smollm2", here / "smollm2"), save_pipeline(request.param, here / "pipeline")


@pytest.fixture(scope="module")
def on_cpu(folders: tuple[Path, Path]) -> Outcome:
    return run(load(folders[0], image_model=folders[1]), images())


def differences(got: Outcome, expected: Outcome) -> dict[str, np.ndarray]:
    """Of the finished images, in colours."""
    found = {}
    for one in images():
        ours, theirs = got.outputs[one.request_id], expected.outputs[one.request_id]
        assert ours.finish is FinishReason.STOP and not ours.error
        assert ours.denoise_steps == list(range(1, one.image.steps + 1))
        a, b = (np.frombuffer(output.images[one.image.steps], np.uint8).astype(int) for output in (ours, theirs))
        found[one.request_id] = np.abs(a - b)
    return found


def test_they_are_the_cpus_but_for_rounding(folders: tuple[Path, Path], on_cpu: Outcome) -> None:
    gpu = on_gpu(*folders)
    tokens = run(gpu, work()).outputs
    for overlap in (False, True):
        got = run(gpu, [*images(), *work()], overlap=overlap)
        assert max(off.max() for off in differences(got, on_cpu).values()) <= 3
        for name, output in tokens.items():
            assert got.tokens(name) == output.token_ids


def test_half_precision_draws_nearly_the_same(folders: tuple[Path, Path], on_cpu: Outcome) -> None:
    got = run(on_gpu(*folders, dtype="bfloat16"), images())
    assert max(off.mean() for off in differences(got, on_cpu).values()) < 16


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_their_steps_wait_for_nothing(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are encoded by the library, which waits: once for an image. Checkpoints are copied without waiting."""
    gpu = on_gpu(*folders)
    run(gpu, images())

    def without_waiting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    denoiser = gpu.runner.denoiser
    monkeypatch.setattr(denoiser, "_denoise_group", without_waiting(denoiser._denoise_group))
    outcome = run(gpu, images(), overlap=True, image=replace(gpu.limits.image, checkpoint_steps=1))
    assert all(output.finish is FinishReason.STOP for output in outcome.outputs.values())
    assert len(outcome.outputs["plain"].checkpoints) == 3


def test_they_go_on_from_any_checkpoint(folders: tuple[Path, Path]) -> None:
    gpu = on_gpu(*folders)
    (asked, *_) = images()
    every_step = replace(gpu.limits.image, checkpoint_steps=1)
    whole = run(gpu, [asked], overlap=True, image=every_step).outputs["plain"]
    for checkpoint in whole.checkpoints.values():
        resumed = run(gpu, [replace(asked, checkpoint=checkpoint)], overlap=True).outputs["plain"]
        assert resumed.images == whole.images
