"""Compiles a model's Triton kernels in processes of their own, while its weights are loaded.

Which kernels there will be is found out without a GPU: the usual steps are computed once on tensors without memory, on
a model of two layers, and what they launch is recorded. What is compiled lies in Triton's cache then, where the engine
finds it. A kernel that was not foreseen is compiled when it is launched.

The kernels of the largest step come first: the memory profile needs them. Then come those of all other steps, without
which no engine is ready. Last come those that others stand in for, and those of captured steps: they are compiled while
the first requests are answered.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import select
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from weft.checkpoint.model_files import ModelFiles
from weft.kernels import Ops, ops_for
from weft.kernels.kv_cache import zero_cache
from weft.kernels.triton import has_triton
from weft.kernels.weights import DecoderWeights
from weft.model.dense import DenseConfig, DenseModel
from weft.model.dense_lora import AdapterSlots
from weft.model.loader import LinearLoading, NoSource, load_weights
from weft.model.shard import WHOLE, Shard
from weft.model.sharded_dense import ShardedDense
from weft.plan import Limits, Row
from weft.switches import is_on, switched_off
from weft.worker.forward_step import ForwardOutput, Stepper
from weft.worker.graphs import graph_shapes
from weft.worker.inputs import StepShape, exact_shape, section_sizes, views
from weft.worker.memory_profile import cache_shape, largest_step
from weft.worker.rows import RowTable
from weft.worker.runner import warm_up_rows

log = logging.getLogger(__name__)

META = torch.device("meta")
ROW_COUNTS = (32, 64, 128, 192, 256, 384, 768)
"""Numbers of tokens that together have every tiling that kernels choose by their rows; the warm-up has smaller and
larger ones."""
NUMBER = struct.Struct("i")
"""The number of a task, as it goes through a pipe."""
NO_PIPE = -1
NICENESS = 10


class FutureSteps(NamedTuple):
    """The facts that decide which kernels the steps of a model will launch."""

    geometry: DenseConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    linears: LinearLoading
    has_float_head: bool
    """The head has floats, however the layers are held."""
    limits: Limits
    most_decodes: int
    """Tokens that the decodes of a captured step may have."""
    with_prefills: bool = True
    """Whether steps with prefills are captured, too."""
    shard: Shard = WHOLE
    num_slots: int = 0
    """Slots of LoRA adapters; 0: no adapters are expected."""
    slot_rank: int = 0

    def compute_largest(self) -> None:
        """Compute the largest step on tensors without memory."""
        stepper = self.stepper()
        _sample(_computed_rows(stepper, largest_step(self.limits).rows), stepper.model.ops)

    def compute(self) -> None:
        """Compute every step that is not captured once on tensors without memory."""
        stepper = self.stepper()
        for slots in self._slots(stepper.model):
            for rows in [*warm_up_rows(stepper.table), *_rows_of_tilings(stepper.table)]:
                output = _computed_rows(stepper, rows, slots)
        _sample(output, stepper.model.ops)

    def compute_captured(self) -> None:
        """Compute every captured step once on tensors without memory."""
        from weft.kernels.triton.launch import overlapping_launches

        stepper = self.stepper()
        for slots in self._slots(stepper.model):
            with overlapping_launches():
                for shape in graph_shapes(self.most_decodes, with_prefills=self.with_prefills):
                    computed(stepper, shape, self.limits.max_model_len, slots)

    def stepper(self, num_layers: int = 2) -> Stepper:
        """Return a stepper of a model of so many layers, without memory."""
        limits, geometry = self.limits, replace(self.geometry, num_layers=num_layers)
        files = ModelFiles(name="", path=Path(), kind="dummy", weight_files=[])
        weights = load_weights(
            files, geometry, NoSource(), dtype=self.dtype, device=META, linears=self.linears, shard=self.shard
        )
        if self.has_float_head:
            weights = weights._replace(head=torch.empty(weights.head.shape, dtype=self.dtype, device=META))
        model = self._model(geometry, weights)
        table = RowTable(limits.max_num_seqs, limits.max_model_len, limits.block_size, META)
        shape = cache_shape(model.config, 2, limits.block_size)
        return Stepper(model, zero_cache(shape, self.kv_dtype, META), table)

    def _slots(self, model: DenseModel) -> list[AdapterSlots | None]:
        """Return the slots that steps may read; None is for those without adapters."""
        return [None, AdapterSlots(model, self.num_slots, self.slot_rank)] if self.num_slots else [None]

    def _model(self, geometry: DenseConfig, weights: DecoderWeights) -> DenseModel:
        ops, longest = ops_for("cuda"), self.limits.max_model_len
        if self.shard.size == 1:
            return DenseModel(geometry, weights, ops, longest)
        return ShardedDense(geometry, self.shard, weights, ops, RecordedRanks(self.shard.size), longest)


class RecordedRanks:
    """Ranks that are not there: what one of them launches is recorded."""

    def __init__(self, size: int) -> None:
        from weft.kernels.triton.all_reduce import OneShot

        self._one_shot = OneShot(0, torch.empty(size, dtype=torch.int64, device=META))
        self._size = size

    def all_reduce(self, tensor: Tensor, residual: Tensor | None = None) -> None:
        if self._one_shot.takes(tensor, residual):
            self._one_shot.all_reduce(tensor, residual)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [torch.empty_like(tensor) for _ in range(self._size)]


def _rows_of_tilings(table: RowTable) -> list[list[Row]]:
    """Return the rows of steps with these numbers of tokens, and with the most decodes: decodes, and one prompt where
    there cannot be so many."""
    row, longest = table.padding_row, table.tokens.shape[1]
    return [
        [Row(row, 0, 1, [], True)] * count if count <= row else [Row(row, 0, min(count, longest - 1), [], True)]
        for count in sorted({*ROW_COUNTS, row})
    ]


def computed(stepper: Stepper, shape: StepShape, longest: int, slots: AdapterSlots | None = None) -> ForwardOutput:
    shape = shape._replace(slots=slots.count if slots is not None else 0)
    packed = torch.empty(sum(section_sizes(shape)), dtype=torch.int64, device=META)
    return stepper.step(shape, views(packed, shape), longest, slots=slots)


def _computed_rows(stepper: Stepper, rows: list[Row], slots: AdapterSlots | None = None) -> ForwardOutput:
    # With one token more than there are, no prompt is left to the library's attention.
    return computed(stepper, exact_shape(rows), 1 + max(row.start + row.count for row in rows), slots)


def _sample(output: ForwardOutput, ops: Ops) -> None:
    """Sample in every way that has a kernel of its own. Adjusted logits are single floats."""
    logits = output.logits[:1]
    for scores in (logits, logits.float()):
        tokens, peaks = ops.greedy(scores)
        thresholds = ops.keep_thresholds(scores, peaks, peaks, peaks, tokens, peaks)
        for kept in (None, thresholds):
            ops.gumbel_sample(scores, peaks, peaks, tokens, tokens, kept)


class TritonHash(threading.Thread):
    """Computes the hash of Triton's own files, half a second's work, while the device is initialised. Triton looks for
    compiled kernels under it, and keeps it for this process and its forks."""

    def __init__(self) -> None:
        super().__init__(name="weft-triton-hash", daemon=True)
        self.start()

    def run(self) -> None:
        with contextlib.suppress(ImportError):  # it is elsewhere in other versions of Triton
            from triton.runtime.cache import triton_key  # type: ignore[import-not-found]

            triton_key()


class CompileAhead:
    """A process that finds out which kernels there will be, and compiles them in others. What is left of them is told
    by pipes, which close."""

    def __init__(self, steps: Sequence[FutureSteps], capability: tuple[int, int], hashing: threading.Thread) -> None:
        self._began = time.monotonic()
        self._pid = 0
        self._largest = self._eager = self._captured = NO_PIPE
        self._hashing = hashing
        # Weft's own engines have a folder. Elsewhere, as in tests, kernels are compiled as they are launched.
        folder = os.environ.get("TRITON_CACHE_DIR")
        if not folder or not has_triton() or not is_on("compile-ahead"):
            return
        self._done = Path(folder, f"weft-{_digest(steps, capability)}")
        if not self._done.exists():
            # Not every module can be imported in a process that was forked while a thread imported it.
            hashing.join()
            (self._largest, self._eager, self._captured), theirs = zip(*(os.pipe() for _ in range(3)), strict=True)
            self._pid = _forked(lambda: _compile(steps, capability, *theirs), keep=theirs)
            for pipe in theirs:
                os.close(pipe)
            _await_slow_kernels(True)

    def wait_for_largest(self) -> None:
        """Wait until the kernels of the largest step are compiled."""
        self._hashing.join()
        self._largest = _closed(self._largest)

    def wait_for_eager(self) -> None:
        """Wait until the kernels of all steps that are not captured are compiled, or others that stand in for them."""
        self.wait_for_largest()
        self._eager = _closed(self._eager)

    def is_done(self, timeout_s: float = 0.0) -> bool:
        """Return whether all is compiled, after a wait of at most so long. Where it cannot be, kernels are compiled as
        they are launched."""
        if self._captured == NO_PIPE:
            return True
        if not select.select([self._captured], [], [], timeout_s)[0]:
            return False
        self.wait_for_eager()
        self._captured = _closed(self._captured)
        _await_slow_kernels(False)
        _, status = os.waitpid(self._pid, 0)
        if os.waitstatus_to_exitcode(status):
            log.warning("Kernels could not be compiled ahead: the first steps of each kind take longer.")
        else:
            log.info("Kernels for this GPU were compiled, once: %.1f s.", time.monotonic() - self._began)
            self._done.touch(0o600)
        return True

    def wait(self) -> None:
        """Wait until all is compiled."""
        while not self.is_done(60.0):
            pass


def _await_slow_kernels(awaits: bool) -> None:
    # Triton is installed only where CUDA is.
    from weft.kernels.triton.launch import await_slow_kernels

    await_slow_kernels(awaits)


def _closed(pipe: int) -> int:
    """Wait until nobody has a pipe's other end, close this one, and return NO_PIPE."""
    if pipe != NO_PIPE:
        while os.read(pipe, 1):
            pass
        os.close(pipe)
    return NO_PIPE


def _digest(steps: Sequence[FutureSteps], capability: tuple[int, int]) -> str:
    """Return a digest of all that decides which kernels there are."""
    here = Path(__file__).parent
    limits = [replace(one.limits, num_blocks=0) for one in steps]
    known = [one._replace(limits=of) for one, of in zip(steps, limits, strict=True)]
    digest = hashlib.sha256(repr([known, capability, sorted(switched_off(os.environ)), torch.__version__]).encode())
    for source in sorted([*here.glob("*.py"), *here.parent.glob("kernels/**/*.py"), *here.parent.glob("model/*.py")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(
    steps: Sequence[FutureSteps], capability: tuple[int, int], largest: int, eager: int, captured: int
) -> None:
    """Compile the kernels of steps, and close each pipe when those that it stands for are there."""
    from weft.kernels.triton.launch import RecordedLaunch, await_slow_kernels, compile_utilities, recorded_launches

    # Ops on tensors without memory import torch's compiler, which takes seconds, to tell it to keep away from them.
    sys.modules["torch._dynamo"] = dynamo = ModuleType("torch._dynamo")
    dynamo.disable = lambda function, *_, **options: function  # type: ignore[attr-defined]
    known = dict[RecordedLaunch, None]()

    def new_of(compute: Callable[[FutureSteps], None]) -> list[Callable[[], None]]:
        """Return the tasks of compiling what this launches and what came before did not."""
        with recorded_launches(capability) as launches, torch.inference_mode():
            for one in steps:
                compute(one)
        new = [one for one in launches if one not in known]
        known.update(dict.fromkeys(new))
        return [one.compile for one in new]

    num_processes = len(os.sched_getaffinity(0))
    await_slow_kernels(True)
    first = [compile_utilities, *new_of(FutureSteps.compute_largest)]
    # While these are compiled the others are found.
    pid = _forked(lambda: in_processes([first], [largest], num_processes), keep=[largest])
    os.close(largest)
    others = new_of(FutureSteps.compute)
    await_slow_kernels(False)
    last = [*new_of(FutureSteps.compute), *new_of(FutureSteps.compute_captured)]
    in_processes([others, last], [eager, captured], num_processes)
    _require_success([pid])


def in_processes(groups: Sequence[Sequence[Callable[[], None]]], pipes: Sequence[int], num_processes: int) -> None:
    """Do groups of tasks, in their order, in so many forks of this process. The pipe of each group is closed when its
    tasks are done; those behind the first leave the cores to others, as requests may be answered meanwhile. Raises
    ChildProcessError when a process failed, and after the others have ended."""
    tasks = [(task, at) for at, group in enumerate(groups) for task in group]
    numbers, ours = os.pipe()
    os.write(ours, b"".join(map(NUMBER.pack, range(len(tasks)))))
    os.close(ours)

    def work() -> None:
        is_open = list(pipes)
        # Each read takes a number that no other process has.
        while number := os.read(numbers, NUMBER.size):
            task, group = tasks[NUMBER.unpack(number)[0]]
            # This process has no task of earlier groups any more.
            while len(is_open) > len(pipes) - group:
                os.close(is_open.pop(0))
                os.nice(NICENESS)
            task()

    pids = [_forked(work, keep=[numbers, *pipes]) for _ in range(min(num_processes, len(tasks)))]
    for pipe in (numbers, *pipes):
        os.close(pipe)
    _require_success(pids)


def _require_success(pids: Sequence[int]) -> None:
    """Wait for processes to end. Raises ChildProcessError when one of them failed."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        raise ChildProcessError(f"{sum(map(bool, codes))} of {len(codes)} processes failed")


def _forked(work: Callable[[], None], keep: Sequence[int]) -> int:
    """Fork a process that does some work and ends, and return its id. It keeps only these files: a copy of the engine's
    socket would keep the api process from hearing of the engine's end."""
    with warnings.catch_warnings():
        # The other threads only wait for messages.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for number in range(3, 1 + max(int(file.name) for file in Path("/proc/self/fd").iterdir())):
            if number not in keep:
                with contextlib.suppress(OSError):
                    os.close(number)
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may return into the engine
        log.debug("Compiling ahead failed:\n%s", traceback.format_exc())
    finally:
        os._exit(code)
