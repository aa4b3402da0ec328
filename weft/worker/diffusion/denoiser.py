"""Images in the worker: their latents by slot, the prompt embeds that they use, and the units of a plan: prompts to
encode, denoise steps, latents to decode.

A step is a function of the latents before it, so those are kept: a step that was taken back, with the one that was
launched after it, is made again from the same latents.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from weft.kernels import client_tensor
from weft.model.diffusion import flow
from weft.model.diffusion.pipeline import KEPT_STATES, DiffusionPipeline
from weft.payloads import PromptEmbeds
from weft.plan import Denoise, DenoiseAdmission, DenoiseOutput, KeptHiddenStates, StepPlan
from weft.types import FlowSampler, ImageParams
from weft.worker.inputs import arrival_of, sent, to_device, to_host


class PromptEmbedsTable:
    """The table of prompt embeds, by slot."""

    def __init__(
        self, num_slots: int, max_tokens: int, width: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.states = torch.zeros(num_slots, max_tokens, width, dtype=dtype, device=device)
        """Rows behind a prompt's last token are of an older prompt."""

    @property
    def num_bytes(self) -> int:
        return self.states.numel() * self.states.element_size()

    def keep(self, kept: KeptHiddenStates, start: int, states: Tensor) -> None:
        """Write the hidden states of a prompt's tokens from `start` on."""
        self.states[kept.slot, start : start + len(states)] = states

    def put(self, slot: int, embeds: PromptEmbeds) -> None:
        """Write the prompt embeds that a client sent, without waiting for the device."""
        values = client_tensor(embeds)
        self.states[slot, : len(values)] = sent(values, self.states.device)


log = logging.getLogger(__name__)

NO_NUMBER = "The image model's output for this request is not a number."
NOT_PREPARED = "The image model could not begin this image."
NOT_DECODED = "The image model could not decode the latents of this image."

FATAL = torch.OutOfMemoryError, torch.AcceleratorError
"""Errors that no single request causes: a step without memory is taken back, and after a fault of the device nothing in
its memory can be trusted."""


class _Key(NamedTuple):
    """Images of equal keys make their steps in one batch, whichever steps those are."""

    passes: int
    sampler: FlowSampler
    num_steps: int


class _Begun(NamedTuple):
    """An image that the pipeline has prepared."""

    image: ImageParams
    state: Any
    """The pipeline's own state of the image."""


class _Decoded(NamedTuple):
    """Decoded images on their way to the host; None where decoding failed."""

    places: list[int]
    """Their places in the plan."""
    pixels: Tensor | None = None
    is_finite: Tensor | None = None


class _DenoisedGroup(NamedTuple):
    """The output of images that made a step together, or were decoded together, on its way to the host."""

    places: list[int]
    """The places of its images in the plan."""
    is_finite: Tensor
    """Of the latents."""
    decoded: list[_Decoded]
    checkpoints: dict[int, Tensor]
    """The states of images after the step, by place."""


class DenoiseOutputBatch(NamedTuple):
    """The outputs of a plan's units; `read` waits for them."""

    num_units: int
    groups: list[_DenoisedGroup]
    failed: list[int]
    """Places of images that could not be prepared, or whose prompts could not be encoded."""
    arrived: torch.cuda.Event | None

    def read(self) -> list[DenoiseOutput]:
        """Return the outputs in the plan's order."""
        if self.arrived is not None:
            self.arrived.synchronize()
        outputs = [DenoiseOutput()] * self.num_units
        for place in self.failed:
            outputs[place] = DenoiseOutput(error=NOT_PREPARED)
        for group in self.groups:
            for decoded in group.decoded:
                for place, picture in zip(decoded.places, _pictures(decoded), strict=True):
                    outputs[place] = picture
            for place, is_finite in zip(group.places, group.is_finite.tolist(), strict=True):
                if not is_finite:
                    outputs[place] = DenoiseOutput(error=NO_NUMBER)
            for place, state in group.checkpoints.items():
                if not outputs[place].error:
                    outputs[place] = replace(outputs[place], checkpoint=state.numpy().tobytes())
        return outputs


def _pictures(decoded: _Decoded) -> list[DenoiseOutput]:
    if decoded.pixels is None or decoded.is_finite is None:
        return [DenoiseOutput(error=NOT_DECODED)] * len(decoded.places)
    pairs = zip(decoded.pixels, decoded.is_finite.tolist(), strict=True)
    return [
        DenoiseOutput(pixels.numpy().tobytes()) if is_finite else DenoiseOutput(error=NO_NUMBER)
        for pixels, is_finite in pairs
    ]


def latent_slot_bytes(latent_shape: tuple[int, ...], kept_bytes: int) -> int:
    """Return the bytes that an image holds: its latents, and those that its pipeline keeps of it."""
    return KEPT_STATES * math.prod(latent_shape) * torch.float32.itemsize + kept_bytes


class Denoiser:
    """The denoiser runs a diffusion pipeline over `num_slots` latent slots."""

    def __init__(
        self,
        pipeline: DiffusionPipeline[Any],
        num_slots: int,
        *,
        device: torch.device,
        embeds: PromptEmbedsTable | None = None,
    ) -> None:
        self.pipeline = pipeline
        self._latents = torch.zeros(num_slots, KEPT_STATES, *pipeline.latent_shape, device=device)
        """The latents after step s are at s % KEPT_STATES."""
        self._embeds = embeds
        """The prompt embeds, where the language model encodes prompts."""
        self._begun: dict[int, _Begun | None] = {}
        """Images by latent slot; None: the image could not be prepared."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Launch on a stream of its own, which runs beside what is launched after it: the kernels of a small model and
        those of a language model leave each other capacity. The stream waits for what was launched before, which
        includes the prompt embeds of new images. Only images use what images write."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    @property
    def num_bytes(self) -> int:
        """Bytes of the model, the latent slots and the prompt embeds."""
        latents = self._latents.numel() * self._latents.element_size()
        return self.pipeline.num_bytes + latents + (0 if self._embeds is None else self._embeds.num_bytes)

    def take_in(self, plan: StepPlan) -> None:
        for slot in plan.release_slots:
            self._begun.pop(slot, None)
        first = {(one.slot, one.first_step % KEPT_STATES): self._begin(one) for one in plan.admit_images}
        if begun := {place: latents for place, latents in first.items() if latents is not None}:
            columns = [np.array(column, dtype=np.int64) for column in zip(*begun, strict=True)]
            slots, at = to_device(columns, self._device)
            self._latents[slots, at] = sent(torch.stack(list(begun.values())), self._device)

    def warm_up(self) -> bool:
        """Do a piece of warm-up; returns False when there is none left."""
        return self.pipeline.warm_up()

    def keep_hidden_states(self, kept: KeptHiddenStates, start: int, states: Tensor) -> None:
        """Keep the hidden states of a prompt's tokens from `start` on."""
        assert self._embeds is not None, "this pipeline has a text encoder of its own"
        self._embeds.keep(kept, start, states)

    def denoise(self, units: list[Denoise]) -> DenoiseOutputBatch:
        """Do units of images, without waiting for the device."""
        groups: dict[_Key | None, list[int]] = {}
        failed: list[int] = []
        for place, unit in enumerate(units):
            begun = self._begun[unit.slot]
            if begun is None or (unit.stage == "encode" and not self._encode(begun, unit)):
                failed.append(place)
            elif unit.stage == "denoise":
                key = _Key(begun.image.passes, begun.image.sampler, unit.count)
                groups.setdefault(key, []).append(place)
            elif unit.stage == "decode":
                groups.setdefault(None, []).append(place)
        outputs = [
            self._denoise_group(key, places, [units[place] for place in places]) for key, places in groups.items()
        ]
        return DenoiseOutputBatch(len(units), outputs, failed, arrival_of(self._latents))

    def _begin(self, admission: DenoiseAdmission) -> Tensor | None:
        """Return an image's first latents, on the host; None: it could not be prepared."""
        self._begun[admission.slot] = None
        try:
            state, noise = self.pipeline.prepare(admission)
        except FATAL:
            raise
        except Exception:
            log.exception("an image could not be prepared")
            return None
        self._begun[admission.slot] = _Begun(admission.image, state)
        return noise

    def _encode(self, begun: _Begun, unit: Denoise) -> bool:
        """Encode a prompt; an image whose prompt cannot be encoded fails alone."""
        try:
            self.pipeline.encode(begun.state, unit.start)
        except FATAL:
            raise
        except Exception:
            log.exception("a prompt could not be encoded")
            self._begun[unit.slot] = None
        return self._begun[unit.slot] is not None

    def _denoise_group(self, key: _Key | None, places: list[int], units: list[Denoise]) -> _DenoisedGroup:
        """Make the steps of images that agree in their key, and decode those that are shown; without a key, decode."""
        states = [begun.state for unit in units if (begun := self._begun[unit.slot]) is not None]
        starts = [unit.start for unit in units]
        decoded = [i for i, unit in enumerate(units) if unit.wants_image]
        before = [start % KEPT_STATES for start in starts]
        # Of several steps at once the last is the image's last, so no unit begins from its latents.
        after = [(start + 1) % KEPT_STATES for start in starts]
        columns = [[unit.slot for unit in units], before, after, decoded]
        arrays = [np.array(column, dtype=np.int64) for column in columns]
        slots, before_at, after_at, decoded_at = to_device(arrays, self._device)
        latents = self._latents[slots, before_at]
        if key is not None:
            latents = self.pipeline.denoise_step(latents, states, starts, key.num_steps)
            self._latents[slots, after_at] = latents
        checkpoints = {
            places[i]: to_host(torch.cat([latents[i : i + 1], *self.pipeline.remembered(states[i], unit.steps_done)]))
            for i, unit in enumerate(units)
            if unit.wants_checkpoint
        }
        is_finite = to_host(_is_finite(latents))
        pictures = self._decode(latents[decoded_at], [places[i] for i in decoded])
        return _DenoisedGroup(places, is_finite, pictures, checkpoints)

    def _decode(self, latents: Tensor, places: list[int]) -> list[_Decoded]:
        """Decode latents; an image that cannot be decoded fails alone."""
        if not places:
            return []
        try:
            pictures = self.pipeline.decode(latents)
        except FATAL:
            raise
        except Exception:
            if len(places) > 1:
                return [
                    decoded for i, place in enumerate(places) for decoded in self._decode(latents[i : i + 1], [place])
                ]
            log.exception("an image could not be decoded")
            return [_Decoded(places)]
        return [_Decoded(places, to_host(flow.pixels(pictures)), to_host(_is_finite(pictures)))]


def _is_finite(images: Tensor) -> Tensor:
    return images.isfinite().flatten(1).all(1)
