"""Images in the worker: the latents of every canvas, the texts they are drawn from, and the denoise steps of a plan.

A step is a function of the latents before it, so those are kept: a step that was taken back, with the one that was
launched after it, is made again from where it began.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.model import flow
from weft.model.dit import Dit, DitConfig
from weft.plan import Denoise, DenoiseAdmission, Drawn, Held, StepPlan
from weft.types import FlowSampler, ImageParams
from weft.worker.inputs import to_device
from weft.worker.transfer import arrival_of, sent, to_host

NO_NUMBER = "The image model's output for this request is not a number."
KEPT_LATENTS = 3
"""Of each image, those after its last steps: two steps may be under way, and both may be taken back."""
NUM_TEXTS = 2
"""A prompt, and what to steer away from."""


class _Key(NamedTuple):
    """Images that agree in this make their steps together, whichever steps those are."""

    passes: int
    sampler: FlowSampler
    num_steps: int


class _Drawing(NamedTuple):
    image: ImageParams
    times: list[float]
    lengths: tuple[int, int]
    """Of its texts."""


class _DrawnGroup(NamedTuple):
    """On its way to the host."""

    places: list[int]
    """Of its images in the plan."""
    is_sound: Tensor
    shown: list[int]
    """Those of its images that show."""
    pixels: Tensor


class DrawnBatch(NamedTuple):
    """What a plan's denoise steps brought; `read` waits for it."""

    groups: list[_DrawnGroup]
    arrived: torch.cuda.Event | None

    def read(self) -> list[Drawn]:
        """In the plan's order."""
        if self.arrived is not None:
            self.arrived.synchronize()
        drawn: dict[int, Drawn] = {}
        for group in self.groups:
            for place, is_sound in zip(group.places, group.is_sound.tolist(), strict=True):
                drawn[place] = Drawn() if is_sound else Drawn(error=NO_NUMBER)
            for index, pixels in zip(group.shown, group.pixels, strict=True):
                place = group.places[index]
                if not drawn[place].error:
                    drawn[place] = Drawn(pixels.numpy().tobytes())
        return [drawn[place] for place in range(len(drawn))]


def canvas_bytes(config: DitConfig, text_dtype: torch.dtype) -> int:
    latents = KEPT_LATENTS * math.prod(config.latent_shape) * torch.float32.itemsize
    return latents + NUM_TEXTS * config.max_text_tokens * config.text_width * text_dtype.itemsize


class Denoiser:
    """A model that draws, and `num_slots` canvases."""

    def __init__(self, model: Dit, num_slots: int, *, text_dtype: torch.dtype, device: torch.device) -> None:
        config = model.config
        self.model = model
        self._latents = torch.zeros(num_slots, KEPT_LATENTS, *config.latent_shape, device=device)
        """Those after step s are at s % KEPT_LATENTS."""
        shape = num_slots, NUM_TEXTS, config.max_text_tokens, config.text_width
        self._texts = torch.zeros(shape, dtype=text_dtype, device=device)
        self._drawings: dict[int, _Drawing] = {}
        self._device = device

    @property
    def num_bytes(self) -> int:
        """Of the model and the canvases."""
        tensors = [*self.model.parameters(), self._latents, self._texts]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def take_in(self, plan: StepPlan) -> None:
        for slot in plan.release_slots:
            self._drawings.pop(slot, None)
        for admission in plan.admit_images:
            self._begin(admission)

    def hold(self, held: Held, start: int, states: Tensor) -> None:
        """Keep the hidden states of a prompt's tokens from `start` on."""
        self._texts[held.slot, int(held.is_negative), start : start + len(states)] = states

    def draw(self, steps: list[Denoise]) -> DrawnBatch:
        """Make denoise steps. Nothing here waits for the device."""
        groups: dict[_Key, list[int]] = {}
        for place, step in enumerate(steps):
            image = self._drawings[step.slot].image
            groups.setdefault(_Key(image.passes, image.sampler, step.count), []).append(place)
        drawn = [self._draw_group(key, places, [steps[place] for place in places]) for key, places in groups.items()]
        return DrawnBatch(drawn, arrival_of(self._latents))

    def _begin(self, admission: DenoiseAdmission) -> None:
        image, config = admission.image, self.model.config
        times = flow.times(image.steps, config.shift).tolist()
        lengths = admission.text_length, admission.negative_length
        self._drawings[admission.slot] = _Drawing(image, times, lengths)
        noise = flow.noise(image.seed, config.latent_shape)
        self._latents[admission.slot, 0] = sent(noise, self._device)

    def _draw_group(self, key: _Key, places: list[int], steps: list[Denoise]) -> _DrawnGroup:
        drawings = [self._drawings[step.slot] for step in steps]
        shown = [i for i, step in enumerate(steps) if step.shows]
        before = [step.start % KEPT_LATENTS for step in steps]
        # Of several steps at once the last is the image's last, and its latents are nobody's beginning.
        after = [(step.start + 1) % KEPT_LATENTS for step in steps]
        lengths = [drawing.lengths[text] for text in range(key.passes) for drawing in drawings]
        columns = [[step.slot for step in steps], before, after, shown, lengths]
        arrays = [np.array(column, dtype=np.int64) for column in columns]
        slots, before_at, after_at, shown_at, text_lengths = to_device(arrays, self._device)
        spans = zip(drawings, (step.start for step in steps), strict=True)
        t = self._floats([drawing.times[start : start + key.num_steps + 1] for drawing, start in spans]).unbind(1)
        scale = self._floats([drawing.image.guidance_scale for drawing in drawings])
        text = self._texts[slots, : key.passes].transpose(0, 1).flatten(0, 1)

        def velocity(latents: Tensor, t: Tensor) -> Tensor:
            passes = key.passes
            found = self.model.velocity(latents.repeat(passes, 1, 1, 1), t.repeat(passes), text, text_lengths)
            if passes == 1:
                return found
            conditional, unconditional = found.chunk(2)
            return flow.guided(conditional, unconditional, scale)

        latents = self._latents[slots, before_at]
        for i in range(key.num_steps):
            latents = flow.STEPS[key.sampler](latents, t[i], t[i + 1], velocity)
        self._latents[slots, after_at] = latents
        is_sound = latents.isfinite().flatten(1).all(1)
        return _DrawnGroup(places, to_host(is_sound), shown, to_host(flow.pixels(latents[shown_at])))

    def _floats(self, values: list[float] | list[list[float]]) -> Tensor:
        return sent(torch.tensor(values, dtype=torch.float32), self._device)
