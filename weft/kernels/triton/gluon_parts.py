"""Parts of kernels in Gluon, Triton's language for one's own layouts and waits: dependent launches, slots in turn."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def wait_for_inputs(PDL: gl.constexpr):
    """Wait for the kernel before this one. Until then a kernel may read weights and nothing else."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_begin(PDL: gl.constexpr):
    """Let programs of the next kernel begin, as soon as all of this one's do so or have ended."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def next_slot(slot, turn, STAGES: gl.constexpr):
    """Return the slot after this one, and the turn that its barriers are in."""
    is_end = slot == STAGES - 1
    return gl.where(is_end, 0, slot + 1), gl.where(is_end, turn ^ 1, turn)
