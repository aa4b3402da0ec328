"""The shard of a decoder that one rank holds, and the files as that rank reads them.

Queries, keys, values, gates and the vocabulary are cut by their rows; what multiplies their outputs, by its columns. A
rank reads its own rows and columns of a file alone: to the loader they are all that there is.
"""

from __future__ import annotations

from typing import Protocol

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from weft.errors import ConfigError
from weft.kernels.fp8 import GROUP
from weft.model.dense import DenseConfig
from weft.model.dequant import BlockFormat, Groups
from weft.model.int4_formats import Int4Format

Cut = tuple[slice, ...]
"""The part of a tensor that is read: a slice of each dimension."""
ROWS_CUT = ("q", "k", "v", "gate", "up", "embedding", "head")
COLUMNS_CUT = ("output", "down")


class Shard(Struct, frozen=True):
    """The place of a rank among those that hold one model."""

    rank: int = 0
    size: int = 1

    def share(self, count: int, rank: int | None = None) -> tuple[int, int]:
        """Return where a rank's share of so many things begins and ends, whether or not they can be divided."""
        rank = self.rank if rank is None else rank
        return rank * count // self.size, (rank + 1) * count // self.size

    def heads(self, count: int) -> tuple[int, int]:
        """Return the first head of this rank, and the one behind its last. Of fewer heads than ranks each has one, as
        its neighbours may."""
        first, stop = self.share(count)
        return first, max(stop, first + 1)

    def config(self, whole: DenseConfig) -> DenseConfig:
        """Return the geometry of this rank's part of a model."""
        if self.size == 1:
            return whole
        (first, stop), (first_row, last_row) = self.heads(whole.num_kv_heads), self.share(whole.vocab_size)
        return replace(
            whole,
            num_heads=whole.num_heads // self.size,
            num_kv_heads=stop - first,
            intermediate_size=whole.intermediate_size // self.size,
            vocab_size=last_row - first_row,
        )

    def range_of(self, part: str, whole: DenseConfig) -> tuple[int, int, int]:
        """Return the rows or columns of this rank in a linear layer or a table: the first, the one behind the last, and
        how many there are in all."""
        match part:
            case "embedding" | "head":
                return *self.share(whole.vocab_size), whole.vocab_size
            case "gate" | "up" | "down":
                return *self.share(whole.intermediate_size), whole.intermediate_size
            case "k" | "v":
                count, (first, stop) = whole.num_kv_heads, self.heads(whole.num_kv_heads)
            case _:
                count, (first, stop) = whole.num_heads, self.share(whole.num_heads)
        return first * whole.head_dim, stop * whole.head_dim, count * whole.head_dim


WHOLE = Shard()


class CutSource(Protocol):
    """Tensors of which parts can be read."""

    @property
    def int4(self) -> Int4Format | None: ...

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def number_type(self, name: str) -> str: ...

    def block_format(self, name: str) -> BlockFormat | None: ...

    def read_into(self, out: Tensor, name: str, cut: Cut | None = None) -> None: ...

    def groups(self, name: str, device: torch.device, cut: Cut | None = None) -> Groups: ...


class ShardedSource:
    """The tensors of a rank: each looks as if the file had this rank's part of it alone."""

    def __init__(self, source: CutSource, names: dict[str, str], whole: DenseConfig, shard: Shard) -> None:
        """Cut the tensors that `names` names by their parts."""
        self._source, self._whole, self._shard = source, whole, shard
        self.int4 = source.int4
        self._parts = {
            _stem(names[part].format(layer)): part
            for part in (*ROWS_CUT, *COLUMNS_CUT)
            for layer in range(whole.num_layers)
        }

    def names(self) -> set[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._source.shape(name)
        cut = self._cut(name)
        return stored if cut is None else tuple(len(range(size)[one]) for size, one in zip(stored, cut, strict=True))

    def number_type(self, name: str) -> str:
        return self._source.number_type(name)

    def block_format(self, name: str) -> BlockFormat | None:
        return self._source.block_format(name)

    def read_into(self, out: Tensor, name: str) -> None:
        cut = self._cut(name)
        self._source.read_into(out, name, cut)
        if cut is not None and name.endswith("g_idx"):
            if bool((out.diff() < 0).any()):
                raise ConfigError(
                    f"The columns of {name!r} are ordered by activations, and cannot be divided among ranks.",
                    hint="Serve it with --tensor-parallel-size 1, or a checkpoint without act-order.",
                )
            out -= out[0].clone()

    def groups(self, name: str, device: torch.device) -> Groups:
        return self._source.groups(name, device, self._cut(name))

    def _cut(self, name: str) -> Cut | None:
        """Return the part of a tensor that this rank reads; None for all of it."""
        part = self._parts.get(_stem(name))
        dimension = None if part is None else self._dimension(name, by_rows=part in ROWS_CUT)
        stored = self._source.shape(name)
        # A lone scale is of all rows and columns.
        if part is None or dimension is None or dimension >= len(stored) or stored[dimension] == 1:
            return None
        first, stop, count = self._shard.range_of(part, self._whole)
        size = stored[dimension]
        # Packed numbers, and the scales of blocks and groups, are of so many rows or columns each.
        unit = 1 if size == count else GROUP if self.int4 is None else count // size
        if first % unit or (stop % unit and stop != count):
            raise ConfigError(
                f"The tensor {name!r} cannot be divided among {self._shard.size} ranks: a part would begin or end "
                f"inside of a group of {unit} weights.",
                hint="Set another --tensor-parallel-size.",
            )
        cut = [slice(None)] * len(stored)
        cut[dimension] = slice(first // unit, -(-stop // unit))
        return tuple(cut)

    def _dimension(self, name: str, *, by_rows: bool) -> int | None:
        """Return the dimension of a tensor in which a layer's rows, or its columns, lie; None where it has none."""
        suffix = name.rpartition(".")[2]
        if suffix == "bias":
            return 0 if by_rows else None
        if suffix.endswith("g_idx"):
            return None if by_rows else 0
        is_transposed = self.int4 is not None and self.int4.is_transposed and suffix in ("qweight", "scales", "qzeros")
        return 0 if by_rows != is_transposed else 1


def _stem(name: str) -> str:
    return name.rpartition(".")[0]
