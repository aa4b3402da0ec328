"""CUDA graphs of steps: one launch runs the whole step, from the row table to the sampled tokens in it.

A graph is captured for a shape and serves every plan that fits into it. The server does not wait for graphs: a shape is
captured while the engine is idle, or when steps have needed it a few times; until then they run without one.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.model.dense_lora import AdapterSlots
from weft.switches import is_on
from weft.worker.forward_step import ForwardOutput, Stepper
from weft.worker.inputs import StepShape, section_sizes, send_into, views
from weft.worker.rows import Ints

log = logging.getLogger(__name__)

DECODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
DECODES_BESIDE_PREFILLS = (0, 8, 32, 64, 128, 192, 256, 384, 512)
PREFILL_TOKENS = (128, 256, 384)
LONE_PREFILL_TOKENS = (512, 768, 1024, 1280, 1536, 1792, 2048)
"""Prompt tokens of larger steps without decodes: to launch their kernels one by one takes longer than to run them."""
PREFILLS = 16
"""Prefills of a step; each may be a whole prompt or a chunk of one."""
CAPTURE_AFTER = 3
"""Steps of a shape before it is captured in a running step."""
COMPILING_WAIT_SECONDS = 0.01
"""How long an idle engine waits for kernels before it looks for requests."""


class Captured(NamedTuple):
    """A captured graph, with the memory of its inputs and outputs."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    """The packed inputs, written before a replay."""
    output: ForwardOutput


def graph_shapes(max_rows: int, *, with_prefills: bool = True) -> list[StepShape]:
    """Return the shapes that graphs are captured for, the largest of each kind first."""
    shapes = [StepShape(size, 0, 0, size) for size in reversed(_up_to(max_rows, DECODES))]
    if with_prefills and is_on("prompt-graphs"):
        shapes += [StepShape(0, PREFILLS, tokens, PREFILLS) for tokens in reversed(LONE_PREFILL_TOKENS)]
        shapes += [
            StepShape(decodes, PREFILLS, tokens, decodes + PREFILLS)
            for tokens in reversed(PREFILL_TOKENS)
            for decodes in reversed(_up_to(max_rows, DECODES_BESIDE_PREFILLS))
        ]
    return shapes


class StepGraphs:
    """The graphs of a stepper by the shapes of steps: those without adapters, or those that read slots of them."""

    def __init__(
        self,
        stepper: Stepper,
        max_rows: int,
        *,
        with_prefills: bool = True,
        slots: AdapterSlots | None = None,
        beside: StepGraphs | None = None,
        agree: Callable[[bool], bool] | None = None,
        is_compiled: Callable[[float], bool] = lambda timeout_s: True,
    ) -> None:
        """Capture graphs of steps that read `slots`, in the memory of the graphs `beside` them. With
        ranks `agree` says whether all have a graph, given whether this one has: all replay it, or none does. Nothing is
        captured until `is_compiled`, which waits for so many seconds at most, says that the kernels are there."""
        self.slots = slots
        self._agree = agree
        self._is_compiled = is_compiled
        self._stepper = stepper
        self._max_rows = max_rows
        self._decodes = _up_to(max_rows, DECODES)
        self._beside_prefills = _up_to(max_rows, DECODES_BESIDE_PREFILLS)
        self._captured: dict[StepShape, Captured] = {}
        shapes = graph_shapes(max_rows, with_prefills=with_prefills)
        num_slots = slots.count if slots is not None else 0
        self._wanted = dict.fromkeys((shape._replace(slots=num_slots) for shape in shapes), 0)
        self._pool: Any = torch.cuda.graph_pool_handle() if beside is None else beside._pool
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def with_slots(self, slots: AdapterSlots) -> StepGraphs:
        """Return graphs of the same steps with adapters, in the same memory: one step is replayed at a time."""
        return StepGraphs(
            self._stepper, self._max_rows, slots=slots, beside=self, agree=self._agree, is_compiled=self._is_compiled
        )

    def shape_for(self, exact: StepShape) -> StepShape | None:
        """Return the shape of a captured graph that a plan fits into, or None."""
        shape = self._padded(exact) if self._is_compiled(0.0) else None
        if shape is None or (shape := shape._replace(slots=exact.slots)) not in self._wanted:
            return None
        self._wanted[shape] += 1
        if shape not in self._captured and self._wanted[shape] >= CAPTURE_AFTER:
            self._try_capture(shape)
        return shape if shape in self._captured else None

    def replay(self, shape: StepShape, packed: Ints) -> ForwardOutput:
        """Replay a graph. The next replay overwrites the output that is returned."""
        captured = self._captured[shape]
        send_into(captured.inputs, torch.from_numpy(packed))
        captured.graph.replay()
        return captured.output

    def capture_next(self) -> bool:
        """Capture one shape that is missing, the largest first: the others then fit in its memory. Returns False when
        none is."""
        if not self._is_compiled(COMPILING_WAIT_SECONDS):
            return True
        for shape in self._wanted:
            if shape not in self._captured:
                self._try_capture(shape)
                return True
        return False

    def _padded(self, exact: StepShape) -> StepShape | None:
        if exact.decodes > self._decodes[-1]:
            return None
        if not exact.prompts:
            size = self._decodes[bisect_left(self._decodes, exact.decodes)]
            return StepShape(size, 0, 0, size)
        if exact.prompts > PREFILLS or exact.prompt_tokens > LONE_PREFILL_TOKENS[-1]:
            return None
        if exact.prompt_tokens > PREFILL_TOKENS[-1]:
            tokens = LONE_PREFILL_TOKENS[bisect_left(LONE_PREFILL_TOKENS, exact.prompt_tokens)]
            return None if exact.decodes else StepShape(0, PREFILLS, tokens, PREFILLS)
        decodes = self._beside_prefills[bisect_left(self._beside_prefills, exact.decodes)]
        tokens = PREFILL_TOKENS[bisect_left(PREFILL_TOKENS, exact.prompt_tokens)]
        return StepShape(decodes, PREFILLS, tokens, decodes + PREFILLS)

    def _try_capture(self, shape: StepShape) -> None:
        """Capture a shape, or give it up if there is no memory for it: its steps then run without a graph."""
        try:
            captured = self._capture(shape)
        except torch.OutOfMemoryError:
            if self._agree is not None:
                raise  # in the middle of a step that other ranks compute
            captured = None
        if (self._agree is None or self._agree(captured is not None)) and captured is not None:
            self._captured[shape] = captured
        else:
            log.warning("No memory for a CUDA graph of %d tokens: such steps run without one.", shape.num_tokens)
            del self._wanted[shape]

    def _capture(self, shape: StepShape) -> Captured | None:
        # Triton is installed only where CUDA is.
        from weft.kernels.triton.launch import overlapping_launches

        table = self._stepper.table
        packed = torch.zeros(sum(section_sizes(shape)), dtype=torch.int64, device=table.device)
        inputs = views(packed, shape)
        for rows in (inputs.token_rows, inputs.sequence_rows, inputs.sample_rows):
            rows.fill_(table.padding_row)
        inputs.query_starts[: shape.decodes] = torch.arange(shape.decodes, device=table.device)
        inputs.query_starts[shape.decodes :] = shape.decodes
        if shape.slots:
            inputs.slot_order.copy_(torch.arange(shape.num_tokens, device=table.device))
            inputs.slot_starts[1:] = shape.num_tokens
        longest = table.tokens.shape[1]
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with overlapping_launches():
            with torch.cuda.stream(self._stream):
                self._stepper.step(shape, inputs, longest, slots=self.slots)
            torch.cuda.current_stream().wait_stream(self._stream)
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    output = self._stepper.step(shape, inputs, longest, slots=self.slots)
            except torch.OutOfMemoryError:
                return None
        return Captured(graph, packed, output)


def _up_to(largest: int, sizes: tuple[int, ...]) -> list[int]:
    return [size for size in sizes if size < largest] + [largest]
