"""Images in the worker: the latents of every canvas, the texts they are drawn from, and the denoise steps of a plan.

A step is a function of the latents before it, so those are kept: a step that was taken back, with the one that was
launched after it, is made again from where it began.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.model.diffusion import flow
from weft.model.diffusion.pipeline import KEPT_STATES, Painter
from weft.payloads import BFLOAT16, PromptEmbeds
from weft.plan import Denoise, DenoiseAdmission, Drawn, Held, StepPlan
from weft.types import FlowSampler, ImageParams
from weft.worker.inputs import arrival_of, sent, to_device, to_host


class TextTable:
    def __init__(
        self, num_slots: int, max_tokens: int, width: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.states = torch.zeros(num_slots, max_tokens, width, dtype=dtype, device=device)
        """What lies behind a text's last token is of an older one."""

    @property
    def num_bytes(self) -> int:
        return self.states.numel() * self.states.element_size()

    def hold(self, held: Held, start: int, states: Tensor) -> None:
        """Keep the hidden states of a prompt's tokens from `start` on."""
        self.states[held.slot, start : start + len(states)] = states

    def put(self, slot: int, embeds: PromptEmbeds) -> None:
        """Keep those that a client sent. Does not wait for the device."""
        values = torch.from_numpy(embeds.array().copy())
        if embeds.dtype == BFLOAT16:
            values = values.view(torch.bfloat16)
        self.states[slot, : len(values)] = sent(values, self.states.device)


log = logging.getLogger(__name__)

NO_NUMBER = "The image model's output for this request is not a number."
NOT_PREPARED = "The image model could not begin this image."
NOT_DECODED = "The image model could not make a picture of its latents."

FATAL = torch.OutOfMemoryError, torch.AcceleratorError
"""No request's own fault: a step without memory is taken back, and after a fault of the device nothing that it holds
can be trusted."""


class _Key(NamedTuple):
    """Images that agree in this make their steps together, whichever steps those are."""

    passes: int
    sampler: FlowSampler
    num_steps: int


class _Begun(NamedTuple):
    image: ImageParams
    drawing: Any
    """The painter's own."""


class _Shown(NamedTuple):
    """Pictures on their way to the host; none where they could not be made."""

    places: list[int]
    """Of their images in the plan."""
    pixels: Tensor | None = None
    is_sound: Tensor | None = None


class _DrawnGroup(NamedTuple):
    """On its way to the host."""

    places: list[int]
    """Of its images in the plan."""
    is_sound: Tensor
    shown: list[_Shown]


class DrawnBatch(NamedTuple):
    """What a plan's denoise steps brought; `read` waits for it."""

    groups: list[_DrawnGroup]
    failed: list[int]
    """The places of images that were never begun."""
    arrived: torch.cuda.Event | None

    def read(self) -> list[Drawn]:
        """In the plan's order."""
        if self.arrived is not None:
            self.arrived.synchronize()
        drawn = {place: Drawn(error=NOT_PREPARED) for place in self.failed}
        for group in self.groups:
            for place, is_sound in zip(group.places, group.is_sound.tolist(), strict=True):
                drawn[place] = Drawn() if is_sound else Drawn(error=NO_NUMBER)
            for shown in group.shown:
                for place, picture in zip(shown.places, _pictures(shown), strict=True):
                    drawn[place] = drawn[place] if drawn[place].error else picture
        return [drawn[place] for place in range(len(drawn))]


def _pictures(shown: _Shown) -> list[Drawn]:
    if shown.pixels is None or shown.is_sound is None:
        return [Drawn(error=NOT_DECODED)] * len(shown.places)
    pairs = zip(shown.pixels, shown.is_sound.tolist(), strict=True)
    return [Drawn(pixels.numpy().tobytes()) if is_sound else Drawn(error=NO_NUMBER) for pixels, is_sound in pairs]


def canvas_bytes(latent_shape: tuple[int, ...], held_bytes: int) -> int:
    """What an image holds: its latents, and this besides."""
    return KEPT_STATES * math.prod(latent_shape) * torch.float32.itemsize + held_bytes


class Denoiser:
    """A model that draws, and `num_slots` canvases."""

    def __init__(
        self, painter: Painter[Any], num_slots: int, *, device: torch.device, texts: TextTable | None = None
    ) -> None:
        self.painter = painter
        self._latents = torch.zeros(num_slots, KEPT_STATES, *painter.latent_shape, device=device)
        """Those after step s are at s % KEPT_STATES."""
        self._texts = texts
        """What the painter draws from, where others encode it."""
        self._begun: dict[int, _Begun | None] = {}
        """None: it could not be."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched here runs beside what is launched after it, on the device: the kernels of a small model and
        those of a language model leave each other room. What was launched before is waited for, on the device too: the
        texts of new images are among it. Nothing but images uses what images write."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    @property
    def num_bytes(self) -> int:
        """Of the model, the canvases and the texts."""
        latents = self._latents.numel() * self._latents.element_size()
        return self.painter.num_bytes + latents + (0 if self._texts is None else self._texts.num_bytes)

    def take_in(self, plan: StepPlan) -> None:
        for slot in plan.release_slots:
            self._begun.pop(slot, None)
        noises = {admission.slot: self._begin(admission) for admission in plan.admit_images}
        if begun := {slot: noise for slot, noise in noises.items() if noise is not None}:
            (slots,) = to_device([np.array(list(begun), dtype=np.int64)], self._device)
            self._latents[slots, 0] = sent(torch.stack(list(begun.values())), self._device)

    def make_ready(self) -> bool:
        """Do a piece of work that makes later steps faster; False when there is none left."""
        return self.painter.make_ready()

    def hold(self, held: Held, start: int, states: Tensor) -> None:
        """Keep the hidden states of a prompt's tokens from `start` on."""
        assert self._texts is not None, "this painter reads its prompts itself"
        self._texts.hold(held, start, states)

    def draw(self, steps: list[Denoise]) -> DrawnBatch:
        """Make denoise steps. Nothing here waits for the device."""
        groups: dict[_Key, list[int]] = {}
        failed: list[int] = []
        for place, step in enumerate(steps):
            if (begun := self._begun[step.slot]) is None:
                failed.append(place)
            else:
                key = _Key(begun.image.passes, begun.image.sampler, step.count)
                groups.setdefault(key, []).append(place)
        drawn = [self._draw_group(key, places, [steps[place] for place in places]) for key, places in groups.items()]
        return DrawnBatch(drawn, failed, arrival_of(self._latents))

    def _begin(self, admission: DenoiseAdmission) -> Tensor | None:
        """Its first latents, on the host; None: there are none."""
        self._begun[admission.slot] = None
        try:
            drawing, noise = self.painter.prepare(admission)
        except FATAL:
            raise
        except Exception:
            log.exception("an image could not be begun")
            return None
        self._begun[admission.slot] = _Begun(admission.image, drawing)
        return noise

    def _draw_group(self, key: _Key, places: list[int], steps: list[Denoise]) -> _DrawnGroup:
        drawings = [begun.drawing for step in steps if (begun := self._begun[step.slot]) is not None]
        starts = [step.start for step in steps]
        shown = [i for i, step in enumerate(steps) if step.shows]
        before = [start % KEPT_STATES for start in starts]
        # Of several steps at once the last is the image's last, and its latents are nobody's beginning.
        after = [(start + 1) % KEPT_STATES for start in starts]
        columns = [[step.slot for step in steps], before, after, shown]
        arrays = [np.array(column, dtype=np.int64) for column in columns]
        slots, before_at, after_at, shown_at = to_device(arrays, self._device)
        latents = self.painter.denoise_step(self._latents[slots, before_at], drawings, starts, key.num_steps)
        self._latents[slots, after_at] = latents
        is_sound = to_host(_is_sound(latents))
        return _DrawnGroup(places, is_sound, self._show(latents[shown_at], [places[i] for i in shown]))

    def _show(self, latents: Tensor, places: list[int]) -> list[_Shown]:
        """One that cannot be decoded does not take the others with it."""
        if not places:
            return []
        try:
            pictures = self.painter.decode(latents)
        except FATAL:
            raise
        except Exception:
            if len(places) > 1:
                return [shown for i, place in enumerate(places) for shown in self._show(latents[i : i + 1], [place])]
            log.exception("an image could not be decoded")
            return [_Shown(places)]
        return [_Shown(places, to_host(flow.pixels(pictures)), to_host(_is_sound(pictures)))]


def _is_sound(images: Tensor) -> Tensor:
    return images.isfinite().flatten(1).all(1)
