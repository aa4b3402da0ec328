"""Trains the text-to-image model by flow matching, from what `prepare` wrote, for a number of minutes or steps.

    python -m training.shapes.train build/shapes out --minutes 11 --compile --graph

Writes the averaged weights (model.safetensors, config.json) and curves.csv.
"""

from __future__ import annotations

import argparse
import copy
import csv
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import mse_loss

from training.shapes.data import COLOUR_NAMES, PALETTE, PICTURES
from training.shapes.prepare import Prepared, read
from weft.model.diffusion.dit import Dit, DitConfig, save

log = logging.getLogger(__name__)

SHARES = {"shapes": 0.3, "glyphs": 0.35, "counts": 0.35}
"""How often each category is drawn."""
DROPPED = 0.1
"""How often the prompt is dropped, so that the model learns to draw without one."""
WARM_UP_STEPS = 1000
EMA_EVERY = 10
EMA_DECAY = 0.995
LOG_EVERY = 200
NUM_JUDGED = 512


class TrainOptions(Struct, frozen=True, kw_only=True):
    minutes: float = math.inf
    """The learning rate falls to 0 by this time, or by `steps`, whichever comes first."""
    steps: int = 1_000_000_000
    batch_size: int = 512
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    seed: int = 0
    compile: bool = False
    graph: bool = False
    """Launch all the kernels of a step as one, on a CUDA device."""


class Batch(Struct, frozen=True):
    images: Tensor
    """Of -1 to 1."""
    text: Tensor
    lengths: Tensor
    noise: Tensor
    t: Tensor


class Examples:
    """Examples drawn on the device: a prompt, a mask of its figure, its colours, noise and a time."""

    def __init__(self, prepared: Prepared, device: torch.device, rows: NDArray[np.int64]) -> None:
        """Of the prompts at these rows."""
        asked = [prepared.prompts[row] for row in rows]

        def put(values: object) -> Tensor:
            return torch.from_numpy(np.asarray(values)).to(device)

        self.states = put(prepared.text.states)
        self.places = put(prepared.text.places[rows]).long()
        self.lengths = put(prepared.text.lengths[rows]).long()
        self.masks = put(prepared.masks)
        self.palette = put(PALETTE)
        pictures = [PICTURES.index((prompt.scene.figure, prompt.scene.count)) for prompt in asked]
        self.first_mask = put(prepared.first_mask[pictures])
        self.num_masks = put(np.diff(prepared.first_mask)[pictures])
        self.colours = put([COLOUR_NAMES.index(prompt.scene.colour) for prompt in asked])
        backgrounds = [[COLOUR_NAMES.index(name) for name in prompt.scene.backgrounds()] for prompt in asked]
        self.num_backgrounds = put([len(names) for names in backgrounds])
        self.backgrounds = put([names + [-1] * (len(COLOUR_NAMES) - len(names)) for names in backgrounds])
        categories = [prompt.scene.category for prompt in asked]
        weights = np.cumsum([SHARES[name] / categories.count(name) for name in categories])
        self.up_to = put(weights / weights[-1])
        """How likely a prompt is one of those up to each."""

    def batch(self, size: int) -> Batch:
        device = self.up_to.device
        chosen = torch.searchsorted(self.up_to, torch.rand(size, dtype=torch.float64, device=device), right=True)
        masks = self.first_mask[chosen] + _below(self.num_masks[chosen])
        cover = self.masks[masks].unsqueeze(1) / 255
        front = self.palette[self.colours[chosen]][:, :, None, None]
        back = self.palette[self.backgrounds[chosen, _below(self.num_backgrounds[chosen])]][:, :, None, None]
        images = (back + cover * (front - back)) / 127.5 - 1
        # More of the times near the noise, where it is decided what the image shows.
        t = torch.sigmoid(0.5 + 1.1 * torch.randn(size, device=device))
        return Batch(images, self.states[self.places[chosen]], self.lengths[chosen], torch.randn_like(images), t)


def _below(limits: Tensor) -> Tensor:
    """For each limit a random whole number from 0 to below it."""
    return (torch.rand(limits.shape, device=limits.device) * limits).long().minimum(limits - 1)


def flow_loss(model: Dit, batch: Batch) -> Tensor:
    """How far the model's velocity is from that of the straight line between an image (time 0) and noise (time 1)."""
    device = batch.images.device.type
    x = torch.lerp(batch.images, batch.noise, batch.t[:, None, None, None])
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        velocity = model(x, batch.t, batch.text, batch.lengths)
    return mse_loss(velocity, batch.noise - batch.images)


def train(config: DitConfig, options: TrainOptions, examples: Examples, judged: Examples, curves: Path) -> Dit:
    """The average of the weights along the way; writes a line of the curves every LOG_EVERY steps."""
    began = time.perf_counter()
    torch.manual_seed(options.seed)
    device = examples.states.device
    with device:
        model = Dit(config)
    average = copy.deepcopy(model).requires_grad_(False)
    held_out = judged.batch(min(NUM_JUDGED, options.batch_size))
    rate, total = torch.zeros((), device=device), torch.zeros((), device=device)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True, capturable=options.graph)

    def advance() -> None:
        optimizer.zero_grad()
        batch = examples.batch(options.batch_size)
        dropped = torch.rand(options.batch_size, device=device) < DROPPED
        loss = flow_loss(model, msgspec.structs.replace(batch, lengths=batch.lengths.masked_fill(dropped, 0)))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total.add_(loss.detach())

    if options.compile:
        for block in model.blocks:  # alike, so that all are compiled by the first
            block.compile()
    if options.graph:
        advance = _captured(advance)
        total.zero_()
        log.info("recorded after %.0f s", time.perf_counter() - began)
    with curves.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["step", "seconds", "loss", "held_out_loss", "learning_rate"])
        step = 0
        while True:
            progress = max(step / options.steps, (time.perf_counter() - began) / 60 / options.minutes)
            if progress >= 1:
                break
            rate.fill_(options.learning_rate * min(1.0, (step + 1) / WARM_UP_STEPS) * _fallen(progress))
            advance()
            step += 1
            if step % EMA_EVERY == 0:
                _average(average, model, min(EMA_DECAY, step / (step + 10 * EMA_EVERY)))
            if step % LOG_EVERY == 0:
                with torch.no_grad():
                    held_out_loss = flow_loss(average, held_out).item()
                mean, seconds = total.item() / LOG_EVERY, time.perf_counter() - began
                total.zero_()
                lines.writerow([step, f"{seconds:.1f}", f"{mean:.5f}", f"{held_out_loss:.5f}", f"{rate.item():.2e}"])
                if step % (10 * LOG_EVERY) == 0 or step == LOG_EVERY:
                    log.info("step %d, %.0f s: loss %.4f, held out %.4f", step, seconds, mean, held_out_loss)
                    file.flush()
    log.info("%d steps in %.0f s", step, time.perf_counter() - began)
    return average


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step's kernels as one launch. It must have run before it is recorded, on a stream of its own."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _fallen(progress: float) -> float:
    """Whole for the first part of the way, then a cosine to 0."""
    return 0.5 + 0.5 * math.cos(math.pi * max(0.0, (progress - 0.3) / 0.7))


@torch.no_grad()
def _average(average: Dit, model: Dit, decay: float) -> None:
    for mean, now in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(now, 1 - decay)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--steps", type=int, default=1_000_000_000)
    parser.add_argument("--batch-size", type=int, default=TrainOptions().batch_size)
    parser.add_argument("--learning-rate", type=float, default=TrainOptions().learning_rate)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--graph", action="store_true", help="launch a step as one CUDA graph")
    parser.add_argument("--width", type=int, default=DitConfig().width)
    parser.add_argument("--depth", type=int, default=DitConfig().depth)
    parser.add_argument("--prompts", type=int, help="train on so many prompts only, evenly chosen")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_float32_matmul_precision("high")
    given.out.mkdir(parents=True, exist_ok=True)
    device, prepared = torch.device(given.device), read(given.data)
    num_prompts, num_training = len(prepared.prompts), prepared.num_training
    rows = np.linspace(0, num_training - 1, given.prompts or num_training).astype(np.int64)
    model = train(
        DitConfig(width=given.width, depth=given.depth),
        TrainOptions(
            minutes=given.minutes,
            steps=given.steps,
            batch_size=given.batch_size,
            learning_rate=given.learning_rate,
            seed=given.seed,
            compile=given.compile,
            graph=given.graph,
        ),
        Examples(prepared, device, rows),
        Examples(prepared, device, np.arange(num_training, num_prompts)),
        given.out / "curves.csv",
    )
    save(model, given.out)


if __name__ == "__main__":
    main()
