"""How native code is made: numba's compiler behind two typed decorators, and a cache of what it has compiled."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from weft.compile_cache import NUMBA, compile_cache

# numba's types know nothing of its configuration, and llvmlite has none.
numba: Any = import_module("numba")
types: Any = import_module("numba.types")
cgutils: Any = import_module("numba.core.cgutils")
ir: Any = import_module("llvmlite.ir")

log = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

# What lets sums be vectorised and multiplied-and-added at once. NaN and infinity keep their meaning: a model that
# overflows must be seen to.
REORDER = frozenset({"reassoc", "contract", "nsz", "arcp"})
IN_ORDER = frozenset({"contract"})


def cache_directory() -> Path:
    """Return where compiled code is kept, under a digest of this package and the layout of weights.

    numba finds its cached code by the place of the outermost function's file, and looks only at that file to see
    whether it is still true, not at the files of what it calls.
    """
    digest = hashlib.sha256(__file__.encode())
    here = Path(__file__).parent
    for source in (*sorted(here.glob("*.py")), here.parent / "quantised.py"):
        digest.update(source.read_bytes())
    return compile_cache() / NUMBA / digest.hexdigest()[:16]


def entry(signature: str | Any) -> Callable[[Function], Function]:
    """A function that Python calls: compiled now or taken from the cache, and run without the GIL."""

    def wrap(function: Function) -> Function:
        wrapped: Function = _kept(partial(numba.njit, signature, nogil=True), function)
        return wrapped

    return wrap


def address_of(signature: Any) -> Callable[[Callable[..., None]], int]:
    """The address of a function that native code calls: compiled as an entry is, once, and not into each caller."""

    def wrap(function: Callable[..., None]) -> int:
        address: int = _kept(partial(numba.cfunc, signature), function).address
        return address

    return wrap


def _kept(decorator: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """Compile a function, or take it from the cache."""
    numba.config.CACHE_DIR = str(_CACHE)
    options = {"error_model": "numpy", "fastmath": set(REORDER)}
    before = os.umask(0o077)
    try:
        return decorator(cache=True, **options)(function)
    except (OSError, RuntimeError) as error:  # numba's, where it can make no file
        log.warning("Compiled kernels cannot be kept in %s (%s): each start compiles them.", _CACHE, error)
        return decorator(cache=False, **options)(function)
    finally:
        os.umask(before)


def inner(function: Function, *, fastmath: frozenset[str] = REORDER) -> Function:
    """A function that only native code calls: compiled into each of its callers."""
    wrapped: Function = numba.njit(function, error_model="numpy", fastmath=set(fastmath))
    return wrapped


def in_order(function: Function) -> Function:
    """As `inner`, where the order of the operations carries the precision."""
    return inner(function, fastmath=IN_ORDER)


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that native code calls, given as the LLVM instructions it stands for."""
    wrapped: Callable[..., Any] = import_module("numba.extending").intrinsic(function)
    return wrapped


_CACHE = cache_directory()
