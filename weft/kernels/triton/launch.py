"""What every launch shares: whether a kernel may start before the one ahead of it in the stream has ended."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_on = os.environ.get("WEFT_TRITON_PDL", "0") == "1"


def overlap_launches(on: bool) -> None:
    """Programmatic dependent launch for kernels launched (or captured) from now on. Off unless WEFT_TRITON_PDL=1."""
    global _on
    _on = on


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
