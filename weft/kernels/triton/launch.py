"""Helpers of kernel launches: programmatic dependent launch, counters that tell the last program of a group, and
launches that are recorded so that their kernels can be compiled before they are needed."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from weft.switches import is_on

MAX_COUNTERS = 1 << 16

_on = False
_awaits_slow_kernels = False
_counters: dict[torch.device, Tensor] = {}


def cdiv(number: int, by: int) -> int:
    """Divide, and round up. Triton's own function takes microseconds, which add up over the launches of a step."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def has_gluon() -> bool:
    """Return whether kernels in Gluon, for compute capability 9, run here. The language is new, and changes with each
    version of Triton."""
    return (
        triton.__version__.startswith("3.6.")
        and not triton.knobs.runtime.interpret
        and triton.runtime.driver.active.get_current_target().arch == 90
    )


@contextmanager
def overlapping_launches() -> Iterator[None]:
    """Use programmatic dependent launch for the kernels launched within. For graphs: it makes a replay faster and an
    eager launch slower (8 ms over the 270 launches of a 7B step)."""
    global _on
    before, _on = _on, is_on("early-launch")
    try:
        yield
    finally:
        _on = before


def launch_options() -> dict[str, bool]:
    """Return the keyword arguments that every launch passes on."""
    return {"PDL": True, "launch_pdl": True} if _on else {"PDL": False}


def awaits_slow_kernels() -> bool:
    """Return whether the kernels that take longest to compile are not there yet: others stand in for them."""
    return _awaits_slow_kernels


def await_slow_kernels(awaits: bool) -> None:
    global _awaits_slow_kernels
    _awaits_slow_kernels = awaits


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait for the kernel before this one. Until then a kernel may read weights and nothing else. Every program calls
    this, those without work too: the next kernel relies on it."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def is_last(counters, at, active):
    """Count this program among the `active` ones of a group; true for the last. Leaves the counter at zero for the
    next launch."""
    tl.debug_barrier()
    before = tl.atomic_add(counters + at, 1, sem="acq_rel", scope="gpu")
    last = before == active - 1
    if last:
        tl.store(counters + at, 0)
    return last


def zeroed_counters(device: torch.device) -> Tensor:
    """Return counters that are zero before every launch and after it. Launches share them, so they must be on one
    stream.

    The first eager launch allocates them. Where a capture comes first, the graph has its own and clears them."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing() and device not in _counters:
        return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
    if device not in _counters:
        _counters[device] = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
    return _counters[device]


class RecordedLaunch(NamedTuple):
    """A kernel, and what a launch of it decides about its code."""

    kernel: Any
    specialisation: str

    def compile(self) -> None:
        """Compile the kernel, and the host code that launches it, into Triton's cache, on a machine with CUDA. The
        active driver is still the one of `recorded_launches`."""
        from triton.backends.nvidia.driver import CudaLauncher

        triton.knobs.runtime.jit_cache_hook = None
        compiled = self.kernel.preload(self.specialisation)
        CudaLauncher(compiled.src, compiled.metadata)


def compile_utilities() -> None:
    """Compile the host code that loads kernels into Triton's cache, on a machine with CUDA."""
    from triton.backends.nvidia.driver import CudaUtils

    CudaUtils()


class _NoDevice:
    """A driver that stands for a GPU of some compute capability, and launches nothing."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        # What kernels keep by device is not mixed up with that of a real one.
        return -1

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def recorded_launches(capability: tuple[int, int]) -> Iterator[list[RecordedLaunch]]:
    """Record the launches within, for a GPU of this compute capability, instead of compiling and launching. Tensors may
    be on any device. When the block is left, each piece of code is there once. The kernels take turns, those of the
    longest source first: variants of one have the same host code, which the first of them compiles."""
    found: dict[RecordedLaunch, None] = {}
    launches: list[RecordedLaunch] = []

    def record(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found[RecordedLaunch(fn.jit_function, compile["specialization_data"])] = None
        return True

    triton.runtime.driver.set_active(_NoDevice(capability))
    triton.knobs.runtime.jit_cache_hook = record
    try:
        yield launches
    finally:
        triton.knobs.runtime.jit_cache_hook = None
        turns: Counter[Any] = Counter()
        order: dict[RecordedLaunch, tuple[int, int]] = {}
        for launch in found:
            turns[launch.kernel] += 1
            order[launch] = turns[launch.kernel], -len(launch.kernel.src)
        launches += sorted(order, key=order.__getitem__)
