"""The diffusion transformer on a CPU: an image's velocity has the same bits whatever else is in the batch, and what its
text is to the model is computed once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.model.dit import Dit, DitConfig, KeysValues, Reading


def reading_bytes(config: DitConfig, dtype: torch.dtype) -> int:
    """Of the longest text. Values are a view of the product that keys were made of, and hold all of it."""
    num_vectors = 1 + 3 * config.depth * config.max_text_tokens
    return num_vectors * config.width * dtype.itemsize


class SteadyDit:
    def __init__(self, model: Dit) -> None:
        self._model = model
        self._keeps_bits: dict[tuple[int, int, int], bool] = {}
        """By the number of images, of those with a text and of threads: whether images computed together have the bits
        of each alone."""
        with torch.inference_mode():
            self._no_text = model.read(torch.zeros(1, 0, model.config.text_width), torch.zeros(1, dtype=torch.int64))

    @torch.inference_mode()
    def read(self, text: Tensor) -> Reading | None:
        """A text [tokens, width]; None when it has no tokens."""
        return self._model.read(text.unsqueeze(0), torch.tensor([len(text)])) if len(text) else None

    @torch.inference_mode()
    def velocity(self, latents: Tensor, t: Tensor, readings: Sequence[Reading | None]) -> Tensor:
        """Of images at times t [B], each with its text."""
        count = len(readings)
        size = count, sum(reading is not None for reading in readings), torch.get_num_threads()
        if self._keeps_bits.get(size):
            return self._together(latents, t, readings)
        alone = [self._together(latents[i : i + 1], t[i : i + 1], readings[i : i + 1]) for i in range(count)]
        # Whether the rows of a product of matrices are rounded as in a smaller one depends on the machine's library
        # and on the sizes, not on the values: the first batch of a size tells for all.
        if size not in self._keeps_bits:
            self._keeps_bits[size] = torch.equal(self._together(latents, t, readings), torch.cat(alone))
        return torch.cat(alone)

    def _together(self, latents: Tensor, t: Tensor, readings: Sequence[Reading | None]) -> Tensor:
        # What has a single row for each image is computed image by image: products of few rows are rounded differently
        # at almost every size.
        conditions = [
            self._model.condition(t[i : i + 1], (reading or self._no_text).whole) for i, reading in enumerate(readings)
        ]
        read = [reading for reading in readings if reading is not None]
        order = sorted(range(len(readings)), key=lambda i: readings[i] is None)
        back = sorted(range(len(readings)), key=order.__getitem__)
        drawn = self._model.drawn(latents[order], torch.cat(conditions)[order], self._words(read))
        return drawn[back]

    def _words(self, readings: Sequence[Reading]) -> list[KeysValues]:
        """Of every block."""
        if not readings:
            return [KeysValues(keys[:0], values[:0]) for keys, values in self._no_text.words]
        blocks = zip(*(reading.words for reading in readings), strict=True)
        return [KeysValues(*(torch.cat(parts) for parts in zip(*block, strict=True))) for block in blocks]
