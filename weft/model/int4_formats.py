"""Reads linear weights of four bits as AWQ, GPTQ and compressed-tensors store them, and knows what is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from msgspec import Struct
from torch import Tensor

from weft.errors import ModelError
from weft.kernels.int_weights import MOST, IntGroups

IN_ORDER, AWQ_ORDER = (0, 1, 2, 3, 4, 5, 6, 7), (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of eight neighbours, from its lowest bits on."""


class Int4Format(Struct, frozen=True):
    """A format says how the tensors of a quantised weight are called and packed."""

    numbers: str = "qweight"
    scales: str = "scales"
    zeros: str = "qzeros"
    groups_of_columns: str = "g_idx"
    is_transposed: bool = True
    """True for tensors of [in, out]."""
    words_of_rows: bool = False
    """True where a word holds the numbers of eight rows of outputs; of zeros it always does."""
    order: tuple[int, ...] = IN_ORDER
    least_zero: int = 0
    """Added to stored zeros."""


AWQ = Int4Format(words_of_rows=True, order=AWQ_ORDER)
GPTQ, GPTQ_V2 = Int4Format(least_zero=1), Int4Format()
COMPRESSED_TENSORS = Int4Format(
    "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", is_transposed=False
)
SUFFIXES = (
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight_packed",
    "weight_zero_point",
    "weight_g_idx",
    "weight_shape",
)


class Tensors(Protocol):
    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def number_type(self, name: str) -> str: ...

    def read_into(self, out: Tensor, name: str) -> None: ...


def int4_format(facts: Mapping[str, Any]) -> Int4Format | None:
    """Return the format that a config.json tells of; None for weights that are not packed. Raises ModelError for what
    is not supported."""
    settings = facts.get("quantization_config")
    if not isinstance(settings, dict):
        return None
    method = settings.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    if method not in ("awq", "gptq"):
        if method == "fp8":
            return None
        raise _unsupported(f"The quantisation {method!r}", "Supported: awq, gptq, compressed-tensors and fp8.")
    bits = settings.get("bits", settings.get("w_bit"))
    if bits != 4:
        raise _unsupported(f"{method} with {bits} bits", "Weights of 4 bits are.")
    if method == "awq":
        version = settings.get("version", "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise _unsupported(f"The layout {version!r} of AWQ", "The layout gemm is.")
        return AWQ
    layout = settings.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise _unsupported(f"The layout {layout!r} of GPTQ", "The layouts gptq and gptq_v2 are.")
    return GPTQ if layout == "gptq" else GPTQ_V2


def _compressed_tensors(settings: Mapping[str, Any]) -> Int4Format | None:
    kind = settings.get("format")
    if kind == "float-quantized":
        return None
    wanted = {"pack-quantized": 4, "int-quantized": 8}.get(kind) if isinstance(kind, str) else None
    if wanted is None:
        raise _unsupported(
            f"The format {kind!r} of compressed-tensors", "pack-quantized, int-quantized and float-quantized are."
        )
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        bits = weights.get("num_bits") if isinstance(weights, dict) else None
        if bits != wanted:
            raise _unsupported(f"{kind} of compressed-tensors with {bits} bits", f"Weights of {wanted} bits are.")
        if wanted == 8 and isinstance(weights, dict) and weights.get("symmetric") is False:
            raise _unsupported("int-quantized of compressed-tensors with zeros", "Symmetric weights are.")
    return COMPRESSED_TENSORS if wanted == 4 else None


def _unsupported(what: str, hint: str) -> ModelError:
    return ModelError(f"{what} is not supported.", hint=f"{hint} Or take an engine of vLLM.")


def read_int4(
    source: Tensors, format: Int4Format, stem: str, num_rows: int, num_columns: int, device: torch.device
) -> IntGroups:
    """Read the weight [rows, columns] whose tensors' names begin with `stem`."""
    name = f"{stem}{format.scales}"
    stored = source.shape(name) if name in source.names() else ()
    num_groups = stored[0 if format.is_transposed else 1] if len(stored) == 2 else 0
    if num_groups < 1 or num_columns % num_groups or num_columns % 8 or num_rows % 8:
        raise ModelError(f"{num_rows} x {num_columns} weights cannot have scales {name!r} of the shape {stored}.")

    def read(suffix: str, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
        name = f"{stem}{suffix}"
        if name not in source.names():
            raise ModelError(f"The model has no tensor {name!r}.", hint="Is a shard missing?")
        if source.shape(name) != shape:
            raise ModelError(f"The tensor {name!r} has the shape {source.shape(name)}; expected {shape}.")
        if (dtype == torch.int32) != (source.number_type(name) == "I32"):
            raise ModelError(f"The tensor {name!r} has numbers of the type {source.number_type(name)}.")
        found = torch.empty(shape, dtype=dtype, device=device)
        source.read_into(found, name)
        return found

    def matrix(suffix: str, rows: int, columns: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return read(suffix, (columns, rows), dtype).T if format.is_transposed else read(suffix, (rows, columns), dtype)

    def unpacked(suffix: str, columns: int, words_of_rows: bool) -> Tensor:
        if words_of_rows:
            return _unpacked(matrix(suffix, num_rows // 8, columns).T, format.order).T
        return _unpacked(matrix(suffix, num_rows, columns // 8), format.order)

    numbers = unpacked(format.numbers, num_columns, format.words_of_rows)
    scales = matrix(format.scales, num_rows, num_groups, torch.float32)
    zeros = None
    if format.is_transposed or f"{stem}{format.zeros}" in source.names():
        zeros = unpacked(format.zeros, num_groups, words_of_rows=True).float() + format.least_zero
    groups = IntGroups(numbers, scales, zeros, num_columns // num_groups)
    if f"{stem}{format.groups_of_columns}" not in source.names():
        return groups
    return _in_order(groups, read(format.groups_of_columns, (num_columns,)), f"{stem}{format.groups_of_columns}")


def _in_order(groups: IntGroups, group_of_column: Tensor, name: str) -> IntGroups:
    """Put columns of a group beside each other."""
    num_groups, size = groups.scales.shape[1], groups.group_size
    order = torch.argsort(group_of_column, stable=True)
    wanted = torch.arange(num_groups, device=order.device, dtype=group_of_column.dtype).repeat_interleave(size)
    if not torch.equal(group_of_column[order], wanted):
        raise ModelError(f"The tensor {name!r} is not of {num_groups} groups of {size} columns.")
    if torch.equal(order, torch.arange(len(order), device=order.device)):
        return groups
    return groups._replace(numbers=groups.numbers[:, order], order=order)


def _unpacked(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return the numbers of words, neighbours in their last dimension."""
    numbers = torch.stack([(words >> 4 * place & MOST).to(torch.uint8) for place in order], dim=-1)
    return numbers.flatten(-2)
