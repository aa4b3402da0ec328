"""CUDA graphs of the diffusion transformer: one launch runs all the kernels of a pass over a batch of images.

A pass of the small model is hundreds of kernels, each shorter than its launch. Graphs are captured while the engine is
idle; until then passes run without one.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from weft.model.diffusion.dit import Dit

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


class _Inputs(NamedTuple):
    """The inputs of a pass. A replay with fewer images leaves the rows behind them as they were."""

    latents: Tensor
    t: Tensor
    embeds: Tensor
    lengths: Tensor

    def first(self, count: int) -> _Inputs:
        return _Inputs(*(values[:count] for values in self))


class VelocityGraphs:
    """The graphs of a diffusion transformer, by batch size."""

    def __init__(self, model: Dit, max_images: int, *, embeds_dtype: torch.dtype, device: torch.device) -> None:
        """Prepare for passes over up to `max_images` images, guided ones counted twice."""
        config = model.config
        self._model = model
        self._sizes = [size for size in SIZES if size < max_images] + [max_images]
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._inputs = _Inputs(
            torch.zeros(max_images, *config.latent_shape, device=device),
            torch.zeros(max_images, device=device),
            torch.zeros(max_images, config.max_text_tokens, config.text_width, dtype=embeds_dtype, device=device),
            torch.zeros(max_images, dtype=torch.int64, device=device),
        )
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def velocity(self, latents: Tensor, t: Tensor, embeds: Tensor, lengths: Tensor) -> Tensor:
        """Compute Dit.velocity by the smallest graph that these images fit into."""
        count = len(latents)
        size = min((size for size in self._captured if size >= count), default=None)
        if size is None:
            return self._model.velocity(latents, t, embeds, lengths)
        for place, values in zip(self._inputs.first(count), (latents, t, embeds, lengths), strict=True):
            place.copy_(values)
        graph, velocity = self._captured[size]
        graph.replay()
        # The next replay overwrites the output.
        return velocity[:count].clone()

    def capture_next(self) -> bool:
        """Capture the largest size that is missing: the others then fit in its memory. A size for which there is no
        memory is given up. Returns False when none is missing."""
        if not self._sizes:
            return False
        size = self._sizes.pop()
        try:
            self._captured[size] = self._capture(self._inputs.first(size))
        except torch.OutOfMemoryError:
            log.warning("No memory for a CUDA graph of %d images: such steps run without one.", size)
        return True

    def _capture(self, inputs: _Inputs) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._model.velocity(*inputs)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            velocity = self._model.velocity(*inputs)
        return graph, velocity
