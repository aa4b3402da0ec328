"""Compiles a model's Triton kernels in processes of their own, while its weights are loaded.

Which kernels there will be is found out without a GPU: the usual steps are computed once on tensors without memory, on
a model of two layers, and what they launch is recorded. What is compiled lies in Triton's cache then, where the engine
finds it. A kernel that was not foreseen is compiled when it is launched.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import sys
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
from weft.kernels.fp8 import zero_cache
from weft.kernels.triton import has_triton
from weft.model.dense import DenseConfig, DenseModel
from weft.model.loader import LinearLoading, NoSource, load_weights
from weft.plan import Limits
from weft.switches import is_on, switched_off
from weft.worker.forward_step import ForwardOutput, Stepper
from weft.worker.graphs import graph_shapes
from weft.worker.inputs import StepShape, exact_shape, section_sizes, views
from weft.worker.memory_profile import cache_shape, largest_step
from weft.worker.rows import RowTable
from weft.worker.runner import warm_up_rows

log = logging.getLogger(__name__)

META = torch.device("meta")


class FutureSteps(NamedTuple):
    """What decides which kernels the steps of a model will launch."""

    geometry: DenseConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    linears: LinearLoading
    limits: Limits
    most_decodes: int
    """Tokens that the decodes of a captured step may have."""
    with_prefills: bool = True
    """Whether steps with prefills are captured, too."""

    def compute(self) -> None:
        """Compute every step once, on tensors without memory."""
        from weft.kernels.triton.launch import overlapping_launches

        if self.linears != "dequantise":
            # Some ops of quantisation know such tensors from there alone, and the engine does without it.
            from torch._meta_registrations import register_meta  # noqa: F401

        limits, geometry = self.limits, replace(self.geometry, num_layers=2)
        files = ModelFiles(name="", path=Path(), kind="dummy", weight_files=[])
        weights = load_weights(files, geometry, NoSource(), dtype=self.dtype, device=META, linears=self.linears)
        model = DenseModel(geometry, weights, ops_for("cuda"), limits.max_model_len)
        table = RowTable(limits.max_num_seqs, limits.max_model_len, limits.block_size, META)
        stepper = Stepper(model, zero_cache(cache_shape(geometry, 2, limits.block_size), self.kv_dtype, META), table)
        for rows in (largest_step(limits).rows, *warm_up_rows(table)):
            output = _computed(stepper, exact_shape(rows))
        with overlapping_launches():
            for shape in graph_shapes(self.most_decodes, with_prefills=self.with_prefills):
                _computed(stepper, shape)
        _sample(output.logits[:1], model.ops)


def _computed(stepper: Stepper, shape: StepShape) -> ForwardOutput:
    packed = torch.empty(sum(section_sizes(shape)), dtype=torch.int64, device=META)
    return stepper.step(shape, views(packed, shape), longest=stepper.table.tokens.shape[1])


def _sample(logits: Tensor, ops: Ops) -> None:
    """Sample in every way that has a kernel of its own. Adjusted logits are single floats."""
    for scores in (logits, logits.float()):
        tokens, peaks = ops.greedy(scores)
        thresholds = ops.keep_thresholds(scores, peaks, peaks, peaks, tokens, peaks)
        for kept in (None, thresholds):
            ops.gumbel_sample(scores, peaks, peaks, tokens, tokens, kept)


class CompileAhead:
    """A process that finds out which kernels there will be, and compiles them in others."""

    def __init__(self, steps: Sequence[FutureSteps], capability: tuple[int, int]) -> None:
        self._began = time.monotonic()
        folder = os.environ.get("TRITON_CACHE_DIR")
        self._done = Path(folder, f"weft-{_digest(steps, capability)}") if folder else None
        self._pid = 0
        if has_triton() and is_on("compile-ahead") and not (self._done and self._done.exists()):
            self._pid = _forked(lambda: _compile(steps, capability))

    def wait(self) -> None:
        """Wait until all is compiled. Where it cannot be, kernels are compiled as they are launched."""
        if not self._pid:
            return
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        if os.waitstatus_to_exitcode(status):
            log.warning("Kernels could not be compiled ahead: the first steps of each kind take longer.")
            return
        log.info("Kernels for this GPU were compiled, once: %.1f s.", time.monotonic() - self._began)
        if self._done is not None:
            self._done.touch(0o600)


def _digest(steps: Sequence[FutureSteps], capability: tuple[int, int]) -> str:
    """Return a digest of all that decides which kernels there are."""
    here = Path(__file__).parent
    limits = [replace(one.limits, num_blocks=0) for one in steps]
    known = [one._replace(limits=of) for one, of in zip(steps, limits, strict=True)]
    digest = hashlib.sha256(repr([known, capability, sorted(switched_off(os.environ)), torch.__version__]).encode())
    for source in sorted([*here.glob("*.py"), *here.parent.glob("kernels/**/*.py"), *here.parent.glob("model/*.py")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(steps: Sequence[FutureSteps], capability: tuple[int, int]) -> None:
    from weft.kernels.triton.launch import compile_utilities, recorded_launches

    # Ops on tensors without memory import torch's compiler, which takes seconds, to tell it to keep away from them.
    sys.modules["torch._dynamo"] = dynamo = ModuleType("torch._dynamo")
    dynamo.disable = lambda function, *_, **options: function  # type: ignore[attr-defined]
    with recorded_launches(capability) as launches, torch.inference_mode():
        for one in steps:
            one.compute()
    in_processes([compile_utilities, *(launch.compile for launch in launches)], len(os.sched_getaffinity(0)))


def in_processes(tasks: Sequence[Callable[[], None]], num_processes: int) -> None:
    """Do each of the tasks in one of so many forks of this process. Raises ChildProcessError when one of these failed,
    and after the others have ended."""
    numbers, ours = os.pipe()
    os.write(ours, b"".join(struct.pack("i", number) for number in range(len(tasks))))
    os.close(ours)

    def work() -> None:
        # Each read takes a number that no other process has.
        while number := os.read(numbers, 4):
            tasks[struct.unpack("i", number)[0]]()

    pids = [_forked(work, keep=numbers) for _ in range(min(num_processes, len(tasks)))]
    os.close(numbers)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        raise ChildProcessError(f"{sum(map(bool, codes))} of {len(codes)} processes failed")


def _forked(work: Callable[[], None], keep: int = -1) -> int:
    """Fork a process that does some work and ends, and return its id. Its other end of the engine's socket would keep
    the api process from hearing of the engine's end: of all files it keeps one."""
    with warnings.catch_warnings():
        # The other threads only wait for messages.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for number in range(3, 1 + max(int(file.name) for file in Path("/proc/self/fd").iterdir())):
            if number != keep:
                with contextlib.suppress(OSError):
                    os.close(number)
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may return into the engine
        log.debug("Compiling ahead failed:\n%s", traceback.format_exc())
    finally:
        os._exit(code)
