"""Raw memory in native code: pointers from addresses, bits, and what threads need to meet.

Kernels index pointers and not arrays: an array's signed index may wrap round, which LLVM does not vectorise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from weft.kernels.cpu.compiled import IS_ARM
from weft.kernels.cpu.emit import float_of_half, half_of_float
from weft.kernels.cpu.emit import prefetch as emit_prefetch
from weft.kernels.cpu.jit import cgutils, intrinsic, ir, numba, types

Float: TypeAlias = Any
"""A float32, and so of numpy's type before the code is compiled."""
Floats: TypeAlias = Any
"""A pointer to float32."""
Ints: TypeAlias = Any
"""A pointer to int64."""
Bytes: TypeAlias = Any
"""A pointer to int8."""

FLOATS = types.CPointer(types.float32)
INTS = types.CPointer(types.int64)
BYTES = types.CPointer(types.int8)

# On Arm the barrier of instructions: its `yield` does nothing.
_PAUSE, _PAUSE_ARGS = ("llvm.aarch64.isb", [ir.IntType(32)(15)]) if IS_ARM else ("llvm.x86.sse2.pause", [])


def record_at(dtype: Any) -> Callable[..., Any]:
    """Make the intrinsic that returns a record from the address of an array of records and an index."""
    kind = numba.from_dtype(dtype)

    @intrinsic
    def record(typing: Any, address: Any, index: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            offset = builder.mul(args[1], ir.IntType(64)(dtype.itemsize))
            return builder.inttoptr(builder.add(args[0], offset), context.get_value_type(kind))

        return kind(types.int64, types.int64), emit

    return record


def _pointer_to(kind: Any) -> Callable[..., Any]:
    """Make the intrinsic that returns the values of numba's type `kind` at an address."""

    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), emit

    return pointer


floats, ints, signed_bytes = (_pointer_to(kind) for kind in (types.float32, types.int64, types.int8))
"""The float32s, the int64s and the int8s at an address."""


@intrinsic
def at(typing: Any, pointer: Any, offset: Any) -> Any:
    """The pointer `offset` elements further on."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.int64), emit


@intrinsic
def prefetch(typing: Any, pointer: Any) -> Any:
    """Ask for the cache line at a pointer."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(pointer), emit


def _float_of_bytes(kind: Any) -> Any:
    @intrinsic
    def load(typing: Any, pointer: Any, offset: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            there = builder.bitcast(builder.gep(args[0], [args[1]]), kind.as_pointer())
            value = builder.load(there, align=1)
            return value if kind == ir.FloatType() else float_of_half(builder, value)

        return types.float32(BYTES, types.int64), emit

    return load


float_at, half_at = _float_of_bytes(ir.FloatType()), _float_of_bytes(ir.IntType(16))
"""The float, and the half, that begins `offset` bytes from a pointer."""


def _store_as(kind: Any) -> Any:
    @intrinsic
    def write(typing: Any, pointer: Any, offset: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            there = builder.bitcast(builder.gep(args[0], [args[1]]), kind.as_pointer())
            builder.store(args[2] if kind == ir.FloatType() else half_of_float(builder, args[2]), there, align=1)
            return context.get_dummy_value()

        return types.void(BYTES, types.int64, types.float32), emit

    return write


store_float, store_half = _store_as(ir.FloatType()), _store_as(ir.IntType(16))
"""Write a float, as it is or as a half, `offset` bytes from a pointer."""


@intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), emit


@intrinsic
def fetch_add(typing: Any, cell: Any, amount: Any) -> Any:
    """Add to a shared cell, and return what it held before."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], args[1], "acq_rel")

    return types.int64(INTS, types.int64), emit


@intrinsic
def load_acquire(typing: Any, cell: Any) -> Any:
    """Read a shared cell, and see all that was written before it was."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(args[0], "acquire", align=8)

    return types.int64(INTS), emit


@intrinsic
def pause(typing: Any) -> Any:
    """Leave the core's other work a moment, between two looks at a shared cell."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in _PAUSE_ARGS])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, _PAUSE), _PAUSE_ARGS)
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def give_way(typing: Any) -> Any:
    """Let another thread have this core."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), emit
