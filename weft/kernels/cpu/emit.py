"""What the kernels written as LLVM instructions are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.kernels.cpu.jit import cgutils, ir
from weft.kernels.cpu.processor import FEATURES

INDEX = ir.IntType(64)
FLOAT = ir.FloatType()
# Floats in a cache line.
LINE = 16


# Floats in a register.
WIDTH = 16 if "avx512f" in FEATURES else 8 if "avx2" in FEATURES else 4
VECTOR = ir.VectorType(FLOAT, WIDTH)


def loop(builder: Any, start: Any, stop: Any, step: int, carried: list[Any], body: Callable[..., list[Any]]) -> Any:
    """Emit `for index in range(start, stop, step): carried = body(index, carried)`; the values carried out."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    values = [builder.phi(value.type) for value in (start, *carried)]
    for phi, value in zip(values, (start, *carried), strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", values[0], stop), inside, after)
    builder.position_at_end(inside)
    following = [builder.add(values[0], INDEX(step)), *body(values[0], values[1:])]
    for phi, value in zip(values, following, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values[1:]


def prefetch(builder: Any, pointer: Any) -> None:
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    # For reading, to stay in every cache, as data.
    how = [number(0), number(3), number(1)]
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.bitcast(pointer, byte), *how])


def call(builder: Any, name: str, *args: Any) -> Any:
    """Call LLVM's own function of that name on floats, or on vectors of them."""
    kind = args[0].type
    suffix = "f32" if kind == FLOAT else f"v{kind.count}f32"
    function = ir.FunctionType(kind, [kind] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}.{suffix}"), args)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, of floats or of vectors."""
    return call(builder, "fma", a, b, c)


def load(builder: Any, kind: Any, pointer: Any, index: Any) -> Any:
    """The float, or the vector of floats, from pointer[index] on."""
    return builder.load(builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer()), align=4)


def store(builder: Any, value: Any, pointer: Any, index: Any) -> None:
    builder.store(value, builder.bitcast(builder.gep(pointer, [index]), value.type.as_pointer()), align=4)


def join(builder: Any, elements: list[Any]) -> Any:
    """A vector of floats."""
    vector = ir.Constant(ir.VectorType(FLOAT, len(elements)), ir.Undefined)
    for i, element in enumerate(elements):
        vector = builder.insert_element(vector, element, ir.IntType(32)(i))
    return vector
