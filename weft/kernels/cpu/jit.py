"""This module makes native code: numba's compiler behind typed decorators, and what turns functions into object files.

Only processes that compile import this: see `compiled`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from weft.kernels.cpu.compiled import CPU_FEATURES, CPU_NAME, SYMBOL, llvm

# numba's types know nothing of its configuration, and llvmlite has none.
numba: Any = import_module("numba")
types: Any = import_module("numba.types")
cgutils: Any = import_module("numba.core.cgutils")
ir: Any = import_module("llvmlite.ir")
_codegen: Any = import_module("numba.core.codegen")
_registry: Any = import_module("numba.core.registry")

# The first to ask makes the compiler, and it stays as it was made.
numba.config.CPU_NAME, numba.config.CPU_FEATURES = CPU_NAME, CPU_FEATURES

Function = TypeVar("Function", bound=Callable[..., Any])

# What lets sums be vectorised and multiplied-and-added at once. NaN and infinity keep their meaning: a model that
# overflows must be seen to.
REORDER = frozenset({"reassoc", "contract", "nsz", "arcp"})
IN_ORDER = frozenset({"contract"})
# Nothing is called from Python, and no memory is allocated.
_BARE = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "no_rewrites": True, "_nrt": False}


def inner(function: Function, *, fastmath: frozenset[str] = REORDER) -> Function:
    """A function that only native code calls."""
    wrapped: Function = numba.njit(function, error_model="numpy", fastmath=set(fastmath), **_BARE)
    return wrapped


def in_order(function: Function) -> Function:
    """Compile as `inner` does a function whose precision depends on the order of its operations."""
    return inner(function, fastmath=IN_ORDER)


def noinline(function: Function) -> Function:
    """Compile as `inner` does, but to one copy that callers share: a loop inside each of them takes LLVM a while."""
    wrapped = inner(function)
    _NOT_INLINED.append(wrapped)
    return wrapped


def export(signature: Any, name: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A function that is compiled by itself, and called by its name: compiled into its callers it would be compiled
    again for each of them. Python calls those whose arguments are all int64s."""

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        symbol = SYMBOL + (name or function.__name__)
        EXPORTS[symbol] = function, signature
        external: Callable[..., None] = types.ExternalFunction(symbol, signature)
        return external

    return wrap


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that native code calls, given as the LLVM instructions it stands for."""
    wrapped: Callable[..., Any] = import_module("numba.extending").intrinsic(function)
    return wrapped


EXPORTS: dict[str, tuple[Callable[..., None], Any]] = {}
"""Functions and signatures by their names in object files."""


_NOT_INLINED: list[Any] = []


class _Library(_codegen.JITCodeLibrary):  # type: ignore[misc]
    """A function as numba lowers it. numba would optimise and translate each with all that it calls, and again within
    each of its callers: 50 s of CPU time for all kernels, where once takes 11."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0


class _Codegen(_codegen.JITCPUCodegen):  # type: ignore[misc]
    _library_class = _Library

    def set_env(self, env_name: str, env: Any) -> None:
        pass


@cache
def _codegen_of_kernels() -> Any:
    """Make numba, in this process, lower functions for `object_code` alone."""
    codegen = _registry.cpu_target.target_context._internal_codegen = _Codegen("weft")
    return codegen


_CALLED = ("llvm.", "mem", "sqrtf", "sched_yield")
"""Names of functions that compiled code may call begin so."""


def object_code(name: str) -> bytes:
    """Compile one of EXPORTS, and all that it calls but others of them, to an object file."""
    function, signature = EXPORTS[name]
    codegen, context = _codegen_of_kernels(), _registry.cpu_target.target_context
    compiled: Any = inner(function)
    compiled.compile(signature.args)
    (result,) = compiled.overloads.values()
    module = result.library._final_module
    for library in _callees(result.library, {result.library}):
        module.link_in(library._final_module, preserve=True)
    module.link_in(llvm.parse_assembly(str(_entry_point(context, name, result.fndesc))))
    apart = {made.fndesc.llvm_func_name for each in _NOT_INLINED for made in each.overloads.values()}
    for each in (*module.functions, *module.global_variables):
        if not each.is_declaration and each.name != name:
            each.linkage = "internal"
        if each.name in apart:
            each.add_function_attribute("noinline")
    passes, builder = codegen._module_pass_manager()
    passes.run(module, builder)
    module.verify()
    called = {each.name for each in module.functions if each.is_declaration}
    if missing := [each for each in called - EXPORTS.keys() if not each.startswith(_CALLED)]:
        raise RuntimeError(f"The kernel {name} calls what is not there without numba: {', '.join(missing)}.")
    code: bytes = codegen._tm.emit_object(module)
    return code


def _entry_point(context: Any, name: str, called: Any) -> Any:
    """A function as C would have it around one as numba has it. Kernels raise no exceptions."""
    module = context.create_module(name)
    numba_type = context.call_conv.get_function_type(called.restype, called.argtypes)
    callee = ir.Function(module, numba_type, called.llvm_func_name)
    arguments = [context.get_argument_type(kind) for kind in called.argtypes]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
    builder = ir.IRBuilder(function.append_basic_block())
    context.call_conv.call_function(builder, callee, called.restype, called.argtypes, function.args)
    builder.ret_void()
    return module


def _callees(library: Any, seen: set[Any]) -> Iterator[Any]:
    for callee in library._linking_libraries:
        if callee not in seen:
            seen.add(callee)
            yield callee
            yield from _callees(callee, seen)
