"""The parts that kernels written as LLVM instructions are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.kernels.cpu.compiled import FEATURES, IS_ARM, WIDTH
from weft.kernels.cpu.jit import cgutils, ir

INDEX = ir.IntType(64)
FLOAT = ir.FloatType()
# Floats in a cache line.
LINE = 16
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
    """a * b + c, of floats or of vectors, rounded once where the processor can."""
    return call(builder, "fma" if IS_ARM or "fma" in FEATURES else "fmuladd", a, b, c)


def float_of_half(builder: Any, bits: Any) -> Any:
    """The float, or the vector of floats, of the 16 bits of a half."""
    count = getattr(bits.type, "count", 0)

    def of(kind: Any) -> Any:
        return ir.VectorType(kind, count) if count else kind

    def constant(kind: Any, value: float) -> Any:
        return ir.Constant(of(kind), [value] * count if count else value)

    if IS_ARM or "f16c" in FEATURES:
        return builder.fpext(builder.bitcast(bits, of(ir.HalfType())), of(FLOAT))
    # Without such an instruction LLVM calls a function that may not be there.
    word = ir.IntType(32)
    given = builder.zext(bits, of(word))
    size = builder.shl(builder.and_(given, constant(word, 0x7FFF)), constant(word, 13))
    # The exponents of the two differ by 112, but for infinity and NaN.
    finite = builder.bitcast(builder.fmul(builder.bitcast(size, of(FLOAT)), constant(FLOAT, 2.0**112)), of(word))
    other = builder.or_(size, constant(word, 0x7F800000))
    value = builder.select(builder.icmp_unsigned("<", size, constant(word, 0x7C00 << 13)), finite, other)
    sign = builder.shl(builder.and_(given, constant(word, 0x8000)), constant(word, 16))
    return builder.bitcast(builder.or_(value, sign), of(FLOAT))


def half_of_float(builder: Any, value: Any) -> Any:
    """The 16 bits of the half that is nearest to a float, and of two as near the even one."""
    half, word = ir.IntType(16), ir.IntType(32)
    if IS_ARM or "f16c" in FEATURES:
        return builder.bitcast(builder.fptrunc(value, ir.HalfType()), half)
    bits = builder.bitcast(value, word)
    size = builder.and_(bits, word(0x7FFFFFFF))
    # Half of what is cut off, less one where the last bit that stays is even; the exponents differ by 112.
    odd = builder.and_(builder.lshr(size, word(13)), word(1))
    normal = builder.sub(builder.lshr(builder.add(builder.add(size, odd), word(0xFFF)), word(13)), word(112 << 10))
    largest = builder.select(builder.icmp_unsigned("<", normal, word(0x7C00)), normal, word(0x7C00))
    # The last bit of a number from 0.5 to 1 is worth as much as that of the smallest halves.
    moved = builder.bitcast(builder.fadd(builder.bitcast(size, FLOAT), FLOAT(0.5)), word)
    small = builder.sub(moved, word(0x3F000000))
    finite = builder.select(builder.icmp_unsigned("<", size, word(0x38800000)), small, largest)
    found = builder.select(builder.icmp_unsigned(">", size, word(0x7F800000)), word(0x7E00), finite)
    return builder.trunc(builder.or_(found, builder.and_(builder.lshr(bits, word(16)), word(0x8000))), half)


def load(builder: Any, kind: Any, pointer: Any, index: Any) -> Any:
    """The float, or the vector of floats, from pointer[index] on."""
    return builder.load(builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer()), align=4)


def load_halves(builder: Any, count: int, pointer: Any, index: Any) -> Any:
    """The float, or the vector of `count` floats, of the halves from pointer[index] on, a pointer to 16 bits."""
    half = ir.IntType(16)
    kind = ir.VectorType(half, count) if count > 1 else half
    there = builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())
    return float_of_half(builder, builder.load(there, align=2))


def store(builder: Any, value: Any, pointer: Any, index: Any) -> None:
    builder.store(value, builder.bitcast(builder.gep(pointer, [index]), value.type.as_pointer()), align=4)


def join(builder: Any, elements: list[Any]) -> Any:
    """A vector of floats."""
    vector = ir.Constant(ir.VectorType(FLOAT, len(elements)), ir.Undefined)
    for i, element in enumerate(elements):
        vector = builder.insert_element(vector, element, ir.IntType(32)(i))
    return vector


def splat(builder: Any, value: Any, count: int) -> Any:
    """A vector of one value."""
    word = ir.IntType(32)
    first = builder.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, word(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(word, count), [0] * count))
