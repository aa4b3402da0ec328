"""What is switched off when a worker starts is what its scheduler does without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_images import save_image_model
from tests.worker.driving import load


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("off", [[], ["denoise-steps"], ["denoise-batches"], ["denoise-steps", "denoise-batches"]])
def test_the_limits_say_how_images_are_drawn(
    off: list[str], tiny_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.worker.diffusion.load.is_on", lambda name: name not in off)
    of_images = load(tiny_directory("smollm2"), image_model=save_image_model(tmp_path / "dit", 96)).limits.image
    assert of_images.whole_images == ("denoise-steps" in off)
    assert of_images.single_images == ("denoise-batches" in off)
