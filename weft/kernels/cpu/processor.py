"""FEATURES tells what the processor that kernels are compiled for can do."""

from __future__ import annotations

import ctypes
import platform
import sys
from importlib import import_module
from typing import Any

from weft.kernels.cpu.jit import numba

_codegen: Any = import_module("numba.core.codegen")
_registry: Any = import_module("numba.core.registry")

IS_ARM = platform.machine() in ("aarch64", "arm64")
# The word of Linux on a processor's abilities, and its bit for the dot products of Arm.
_HWCAP, _HWCAP_ASIMDDP = 16, 1 << 20


def _has_dot_products() -> bool:
    """Return whether this Arm processor has them, of which LLVM does not speak. Every Mac does."""
    return sys.platform == "darwin" or bool(ctypes.CDLL(None).getauxval(_HWCAP) & _HWCAP_ASIMDDP)


def _compiled_for() -> frozenset[str]:
    """LLVM's names of what numba's code may use, which also tell apart what is kept in its cache.

    They are this machine's, or NUMBA_CPU_FEATURES. What a processor of some name can do beyond them is not known here.
    """
    if IS_ARM and numba.config.CPU_FEATURES is None and _has_dot_products():
        found = _codegen.get_host_cpu_features()
        numba.config.CPU_FEATURES = f"{found},+dotprod" if found else "+dotprod"
    # The first to ask makes the compiler, and it stays as it was made.
    _, _, features = _registry.cpu_target.target_context.codegen().magic_tuple()
    return frozenset(feature[1:] for feature in features.split(",") if feature.startswith("+"))


FEATURES = _compiled_for()
