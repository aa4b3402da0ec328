"""The model that comes with Weft draws what it is asked for, by the way that users take."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.training.test_checker import checker
from training.shapes.data import Prompt, held_out_prompts
from weft import LLM

ASKED = 9


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2") as llm:
        yield llm


def test_what_the_default_model_s_companion_draws_is_what_held_out_prompts_ask_for(llm: LLM) -> None:
    def is_right(number: int, prompt: Prompt) -> bool:
        image = llm.draw(prompt.text, seed=1000 + number)
        pixels = np.frombuffer(image.rgb, np.uint8).reshape(image.height, image.width, 3)
        return checker().read(pixels).shows(prompt.scene)

    prompts = held_out_prompts(ASKED, seed=7)
    right = [is_right(number, prompt) for number, prompt in enumerate(prompts)]
    assert sum(right) >= 0.9 * ASKED - 1, [prompt.text for prompt, ok in zip(prompts, right, strict=True) if not ok]
