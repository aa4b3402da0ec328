"""What `prepare` would write, made small and without a language model: texts are random states, one for each word."""

from __future__ import annotations

import zlib
from functools import cache

import numpy as np

from training.shapes.data import EncodedPrompts, Prompt, Scene, held_out_prompts
from training.shapes.prepare import Prepared, render

WIDTH = 24


def states_of(prompts: list[Prompt]) -> EncodedPrompts:
    words = sorted({word for prompt in prompts for word in prompt.text.split()})
    states = [np.random.default_rng(zlib.crc32(word.encode())).standard_normal(WIDTH) for word in words]
    lengths = [len(prompt.text.split()) for prompt in prompts]
    places = np.zeros((len(prompts), max(lengths)), dtype=np.int32)
    for row, prompt in enumerate(prompts):
        places[row, : lengths[row]] = [words.index(word) for word in prompt.text.split()]
    return EncodedPrompts(np.array(states, dtype=np.float16), places, np.array(lengths, dtype=np.int32))


@cache
def prepared() -> Prepared:
    """Two scenes to train on, twelve held out."""
    masks, first = render({"shapes": 24, "glyphs": 12, "counts": 12}, seed=0)
    training = [
        Prompt("a red circle on a white background", Scene("circle", "red", "white")),
        Prompt("a blue square", Scene("square", "blue")),
    ]
    prompts = training + held_out_prompts(12)
    return Prepared(masks, first, prompts, len(training), states_of(prompts))
