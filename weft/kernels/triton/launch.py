"""What every launch shares: whether a kernel may start before the one ahead of it in the stream has ended."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_on = os.environ.get("WEFT_TRITON_PDL") == "1"
_allowed = os.environ.get("WEFT_TRITON_PDL") != "0"


@contextmanager
def overlapping_launches() -> Iterator[None]:
    """Programmatic dependent launch for kernels launched within. For graphs: it makes a replay faster and an eager
    launch slower (8 ms over the 270 launches of a 7B step). WEFT_TRITON_PDL=0 keeps it off, 1 has it on always."""
    global _on
    before, _on = _on, _allowed
    try:
        yield
    finally:
        _on = before


def launch_options() -> dict[str, bool]:
    """Keyword arguments that every launch passes on."""
    return {"PDL": True, "launch_pdl": True} if _on else {"PDL": False}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Before this, a kernel may read weights and nothing else. Every program comes here, those without work too:
    the kernel after this one relies on it."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
