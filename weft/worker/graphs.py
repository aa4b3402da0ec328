"""CUDA graphs of steps: the whole step, from the row table to the sampled tokens in it, as one launch.

A graph is captured for a shape and serves every plan that fits into it. The server does not wait for graphs: a shape is
captured in the engine's idle gaps, or when it has been wanted a few times; until then its steps run without one.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from typing import NamedTuple

import torch
from torch import Tensor

from weft.switches import is_on
from weft.worker.forward_step import Outcome, Stepper
from weft.worker.inputs import StepShape, section_sizes, views

log = logging.getLogger(__name__)

DECODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
DECODES_BESIDE_PROMPTS = (0, 8, 32, 64, 128, 192, 256, 384, 512)
PROMPT_TOKENS = (128, 256, 384)
PROMPTS = 16
"""In one step; each may be a whole prompt or a chunk of one."""
WANTED_OFTEN = 3


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    """Packed; written before a replay."""
    outcome: Outcome


def graph_shapes(max_rows: int) -> list[StepShape]:
    """The shapes that graphs are captured for, the largest of each kind first."""
    shapes = [StepShape(size, 0, 0, size) for size in reversed(_up_to(max_rows, DECODES))]
    if is_on("prompt-graphs"):
        shapes += [
            StepShape(decodes, PROMPTS, tokens, decodes + PROMPTS)
            for tokens in reversed(PROMPT_TOKENS)
            for decodes in reversed(_up_to(max_rows, DECODES_BESIDE_PROMPTS))
        ]
    return shapes


class StepGraphs:
    def __init__(self, stepper: Stepper, max_rows: int) -> None:
        self._stepper = stepper
        self._decodes = _up_to(max_rows, DECODES)
        self._beside_prompts = _up_to(max_rows, DECODES_BESIDE_PROMPTS)
        self._captured: dict[StepShape, Captured] = {}
        self._wanted = dict.fromkeys(graph_shapes(max_rows), 0)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def shape_for(self, exact: StepShape) -> StepShape | None:
        """The shape of a captured graph that a plan fits into, or None."""
        shape = self._padded(exact)
        if shape is None or shape not in self._wanted:
            return None
        self._wanted[shape] += 1
        if shape not in self._captured and self._wanted[shape] >= WANTED_OFTEN:
            self._try_capture(shape)
        return shape if shape in self._captured else None

    def replay(self, shape: StepShape, packed: Tensor) -> Outcome:
        """What it returns is overwritten by the next replay."""
        captured = self._captured[shape]
        captured.inputs.copy_(packed)
        captured.graph.replay()
        return captured.outcome

    def capture_next(self) -> bool:
        """Capture one shape that is missing, the largest first: the others then fit in its memory."""
        for shape in self._wanted:
            if shape not in self._captured:
                self._try_capture(shape)
                return True
        return False

    def _padded(self, exact: StepShape) -> StepShape | None:
        if exact.samples_all:
            size = self._decodes[bisect_left(self._decodes, exact.decodes)]
            return StepShape(size, 0, 0, size)
        if exact.prompts > PROMPTS or exact.prompt_tokens > PROMPT_TOKENS[-1]:
            return None
        decodes = self._beside_prompts[bisect_left(self._beside_prompts, exact.decodes)]
        tokens = PROMPT_TOKENS[bisect_left(PROMPT_TOKENS, exact.prompt_tokens)]
        return StepShape(decodes, PROMPTS, tokens, decodes + PROMPTS)

    def _try_capture(self, shape: StepShape) -> None:
        """A shape for which there is no memory is given up: its steps run without a graph."""
        try:
            self._captured[shape] = self._capture(shape)
        except torch.OutOfMemoryError:
            log.warning("No memory for a CUDA graph of %d tokens: such steps run without one.", shape.num_tokens)
            del self._wanted[shape]

    def _capture(self, shape: StepShape) -> Captured:
        # Triton is there only where CUDA is.
        from weft.kernels.triton.launch import overlapping_launches

        table = self._stepper.table
        packed = torch.zeros(sum(section_sizes(shape)), dtype=torch.int64, device=table.device)
        inputs = views(packed, shape)
        for rows in (inputs.token_rows, inputs.sequence_rows, inputs.sample_rows):
            rows.fill_(table.padding_row)
        inputs.query_starts[: shape.decodes] = torch.arange(shape.decodes, device=table.device)
        inputs.query_starts[shape.decodes :] = shape.decodes
        longest = table.tokens.shape[1]
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with overlapping_launches():
            with torch.cuda.stream(self._stream):
                self._stepper.step(shape, inputs, longest)
            torch.cuda.current_stream().wait_stream(self._stream)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                outcome = self._stepper.step(shape, inputs, longest)
        return Captured(graph, packed, outcome)


def _up_to(most: int, sizes: tuple[int, ...]) -> list[int]:
    return [size for size in sizes if size < most] + [most]
