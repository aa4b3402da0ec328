"""Draws held-out prompts with a trained model and reads from the pixels whether each shows what was asked.

    python -m training.shapes.evaluate MODEL build/shapes OUT --count 200
    python -m training.shapes.evaluate MODEL build/shapes OUT --sweep

Writes scores.json and images.npz; `sheet` makes a picture of the latter. A sweep tries settings on held-out prompts
that do not count for the score, so that settings chosen by it are not chosen by what they are judged by. Needs no
Pillow.
"""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from training.shapes.checker import Checker, Reading
from training.shapes.data import Image, Prompt
from training.shapes.prepare import Prepared, read
from weft.model.diffusion import flow
from weft.model.diffusion.dit import Dit, load
from weft.types import FlowSampler

log = logging.getLogger(__name__)

BATCH = 256


class Settings(Struct, frozen=True, kw_only=True):
    num_steps: int
    guidance_scale: float
    shift: float = 1.0
    sampler: FlowSampler = "euler"


class Scores(Struct, frozen=True, kw_only=True):
    settings: Settings
    right: int
    asked: int
    by_category: dict[str, str]
    wrong: list[tuple[str, Reading]]
    """Prompts that were not met, and what the image shows instead."""


def generate(model: Dit, text: Tensor, lengths: Tensor, seeds: list[int], settings: Settings) -> Image:
    """[prompts, 32, 32, 3]: an image for every text [L, width] of its length, from the noise of its seed."""
    grid = flow.times(settings.num_steps, settings.shift).to(text.device)
    step = flow.STEPS[settings.sampler]
    scale = torch.full((len(text),), settings.guidance_scale, device=text.device)
    both_texts = torch.cat([text, text])
    both_lengths = torch.cat([lengths, torch.zeros_like(lengths)])

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        if settings.guidance_scale == 1:
            return model.velocity(x, t, text, lengths)
        with_text, without = model.velocity(torch.cat([x, x]), torch.cat([t, t]), both_texts, both_lengths).chunk(2)
        return flow.guided(with_text, without, scale)

    x = torch.stack([flow.noise(seed, model.config.latent_shape) for seed in seeds]).to(text.device)
    for t, t_next in pairwise(grid):
        x = step(x, t.expand(len(x)), t_next.expand(len(x)), velocity)
    images: Image = flow.pixels(x).cpu().numpy()
    return images


def draw_held_out(model: Dit, prepared: Prepared, which: range, settings: Settings, seed: int) -> Image:
    device = model.positions.device
    parts = []
    for start in range(which.start, which.stop, BATCH):
        part = range(start, min(start + BATCH, which.stop))
        rows = slice(prepared.num_training + part.start, prepared.num_training + part.stop)
        text = torch.from_numpy(prepared.text.states[prepared.text.places[rows]]).to(device)
        lengths = torch.from_numpy(prepared.text.lengths[rows]).long().to(device)
        parts.append(generate(model, text, lengths, [seed + k for k in part], settings))
    return np.concatenate(parts)


def judge(checker: Checker, prompts: Sequence[Prompt], images: Image, settings: Settings) -> Scores:
    asked, right, wrong = Counter[str](), Counter[str](), []
    for prompt, image in zip(prompts, images, strict=True):
        reading = checker.read(image)
        asked[prompt.scene.category] += 1
        if reading.shows(prompt.scene):
            right[prompt.scene.category] += 1
        else:
            wrong.append((prompt.text, reading))
    return Scores(
        settings=settings,
        right=right.total(),
        asked=asked.total(),
        by_category={name: f"{right[name]} of {asked[name]}" for name in asked},
        wrong=wrong,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=200, help="the score's, of those that were prepared")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--shift", type=float)
    parser.add_argument("--sampler", choices=list(flow.STEPS), default="euler")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sweep", action="store_true", help="also try other settings, on the other prompts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given.out.mkdir(parents=True, exist_ok=True)
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    model, prepared = load(given.model, dtype=dtype, device=given.device), read(given.data)
    checker, config = Checker(prepared.masks, prepared.first_mask), model.config
    judged = range(min(given.count, len(prepared.held_out)))
    others = range(judged.stop, len(prepared.held_out))

    def score(which: range, settings: Settings) -> tuple[Scores, Image]:
        images = draw_held_out(model, prepared, which, settings, given.seed)
        scores = judge(checker, prepared.held_out[which.start : which.stop], images, settings)
        log.info("%d of %d right %s: %s", scores.right, scores.asked, scores.by_category, settings)
        return scores, images

    chosen = Settings(
        num_steps=given.steps or config.num_steps,
        guidance_scale=config.guidance_scale if given.guidance is None else given.guidance,
        shift=config.shift if given.shift is None else given.shift,
        sampler=given.sampler,
    )
    scores, images = score(judged, chosen)
    texts = [prompt.text for prompt in prepared.held_out[: judged.stop]]
    np.savez_compressed(given.out / "images.npz", images=images, texts=texts)
    (given.out / "scores.json").write_bytes(msgspec.json.format(msgspec.json.encode(scores)) + b"\n")
    if given.sweep:
        log.info("on %d other prompts:", len(others))
        grid = [(steps, scale, shift) for steps in (15, 25) for scale in (1.5, 2, 3, 4) for shift in (1.0, 2.0)]
        swept = [Settings(num_steps=steps, guidance_scale=scale, shift=shift) for steps, scale, shift in grid]
        swept += [Settings(num_steps=steps, guidance_scale=3, sampler="heun") for steps in (5, 10)]
        (given.out / "sweep.json").write_bytes(msgspec.json.encode([score(others, each)[0] for each in swept]))


if __name__ == "__main__":
    main()
