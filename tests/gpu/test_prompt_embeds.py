"""Tensors of clients on a GPU: the image of the prompt whose states they are, and nobody waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests import tiny_models
from tests.gpu.test_engine import forbid_waiting, work
from tests.gpu.test_images import on_gpu
from tests.tiny_images import save_image_model
from tests.worker.driving import run
from tests.worker.test_denoise import TEXTS, WIDTH, image, images
from tests.worker.test_prompt_embeds import embeds, given, pictures
from weft.plan import KeptHiddenStates
from weft.worker.diffusion.denoiser import PromptEmbedsTable

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    here = tmp_path_factory.mktemp("texts")
    return tiny_models.save_directory("smollm2", here / "smollm2"), save_image_model(here / "dit", WIDTH)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_and_prompts_are_one_to_an_image(
    folders: tuple[Path, Path], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[torch.Tensor] = []
    hold = PromptEmbedsTable.keep

    def watching(table: PromptEmbedsTable, one: KeptHiddenStates, start: int, states: torch.Tensor) -> None:
        held.append(states.cpu())
        hold(table, one, start, states)

    monkeypatch.setattr(PromptEmbedsTable, "keep", watching)
    gpu = on_gpu(*folders, dtype=dtype)
    asked = image("i", TEXTS[0], negative_token_ids=TEXTS[1])
    expected = pictures(gpu, asked)
    prompt, negative = (embeds(states, dtype) for states in held)
    assert pictures(gpu, given(asked, prompt=prompt, negative=negative)) == expected
    assert pictures(gpu, given(asked, prompt=prompt)) == expected
    assert len(held) == 3, "a prompt was encoded that nobody asked for"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_their_steps_wait_for_nothing(folders: tuple[Path, Path]) -> None:
    gpu = on_gpu(*folders)
    while gpu.runner.prepare():
        pass
    rows = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1))
    from_tensors = [
        given(image(f"{dtype} {i}", [], seed=i), prompt=embeds(rows, dtype))
        for i, dtype in enumerate(["float32", "float16", "bfloat16"])
    ]
    run(gpu, [*from_tensors, *images(), *work()])
    forbid_waiting(gpu)
    run(gpu, [*from_tensors, *images(), *work()], overlap=True)
