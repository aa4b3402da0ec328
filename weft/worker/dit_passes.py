"""Passes of the diffusion transformer over images with their texts, which lie in the table of texts by slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from weft.model.dit import Dit, Reading
from weft.model.flow import Velocity
from weft.model.steady import SteadyDit
from weft.plan import PlacedText
from weft.types import ImageParams
from weft.worker.dit_graphs import VelocityGraphs
from weft.worker.inputs import to_device
from weft.worker.texts import TextTable


class DitDrawing(NamedTuple):
    image: ImageParams
    times: list[float]
    texts: tuple[PlacedText, PlacedText]
    """Its prompt, and what it is steered away from."""
    readings: dict[int, Reading | None]
    """Of its texts by their place there, as far as they were read."""


class Passes(Protocol):
    def over(self, drawings: Sequence[DitDrawing], count: int) -> Velocity:
        """The first `count` passes over each of these images, those with their prompts first."""


class DevicePasses:
    """Of many images at once, by graphs where there are any. Texts are read with every pass."""

    def __init__(self, model: Dit | VelocityGraphs, texts: TextTable) -> None:
        self._model = model
        self._texts = texts

    def over(self, drawings: Sequence[DitDrawing], count: int) -> Velocity:
        texts = [drawing.texts[number] for number in range(count) for drawing in drawings]
        columns = [text.slot for text in texts], [text.length for text in texts]
        arrays = [np.array(column, dtype=np.int64) for column in columns]
        slots, lengths = to_device(arrays, self._texts.states.device)
        # No text at all has slot -1, which is the last one's: of length 0, none of it counts.
        text = self._texts.states[slots]
        return lambda latents, t: self._model.velocity(latents.repeat(count, 1, 1, 1), t.repeat(count), text, lengths)


class SteadyPasses:
    """Bits that company does not change."""

    def __init__(self, model: Dit, texts: TextTable) -> None:
        self._model = SteadyDit(model)
        self._texts = texts

    def over(self, drawings: Sequence[DitDrawing], count: int) -> Velocity:
        readings = [self._read(drawing, number) for number in range(count) for drawing in drawings]
        return lambda latents, t: self._model.velocity(latents.repeat(count, 1, 1, 1), t.repeat(count), readings)

    def _read(self, drawing: DitDrawing, number: int) -> Reading | None:
        if number not in drawing.readings:
            text = drawing.texts[number]
            drawing.readings[number] = self._model.read(self._texts.states[text.slot, : text.length])
        return drawing.readings[number]
