"""The native step, as Python calls it: a decoder bound to its weights, its cache, and a team of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeGuard
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.batch import AttentionBatch, HeadShape, InputEmbeds
from weft.kernels.cpu.compiled import kernels, part_of_step
from weft.kernels.cpu.job import (
    CELLS,
    CLAIMS,
    ITEM,
    JOB,
    KEYS,
    KV_FLOAT16,
    KV_FLOAT32,
    KV_INT8,
    LANES,
    LAYER,
    PLACE_FIELDS,
    QUERIES,
    RUN,
    SCRATCH_FLOATS,
)
from weft.kernels.kv_cache import Int8Cache, KvCache
from weft.kernels.panel_format import FORMATS, INPUT_GROUP
from weft.kernels.quantised import QuantisedWeight
from weft.kernels.weights import AdaptedRun, AdapterWeights, DecoderWeights, LowRank, Weight

_NONE = torch.empty(0, dtype=torch.int64)
_KV_KINDS = {torch.float32: KV_FLOAT32, torch.float16: KV_FLOAT16, torch.int8: KV_INT8}
RUN_TOKENS = 16

Job = Callable[[int], None]
"""Called by each thread with its number. It must meet the others at its end: see `phases.wait_for_all`."""


class RankWork(Protocol):
    """The work of a step that all ranks of a model do together."""

    def embed(self, tokens: Tensor, input_embeds: InputEmbeds | None = None) -> Tensor: ...

    def all_reduce(self, tensor: Tensor) -> None: ...

    def gathered(self, logits: Tensor) -> Tensor: ...


class Team:
    """The calling thread and its helpers."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._cells = np.zeros(CELLS, np.int64)
        self._job: Job | None = None
        self._closed = False
        self._busy = threading.Lock()
        self._wake = [threading.Lock() for _ in range(num_threads - 1)]
        for thread, wake in enumerate(self._wake, start=1):
            wake.acquire()
            threading.Thread(target=self._help, args=(thread, wake), name=f"weft-cpu-{thread}", daemon=True).start()

    @property
    def cells_address(self) -> int:
        return int(self._cells.ctypes.data)

    @property
    def claims(self) -> int:
        """The next job's claims begin here. The number stands still between jobs."""
        return int(self._cells[CLAIMS])

    def run(self, make_job: Callable[[], Job]) -> None:
        """Make a job once no other runs, and run it on every thread."""
        with self._busy:
            if self._closed:
                raise RuntimeError("The team of threads is closed.")
            job = self._job = make_job()
            for wake in self._wake:
                wake.release()
            job(0)

    def close(self) -> None:
        with self._busy:
            self._job, self._closed = None, True
            for wake in self._wake:
                wake.release()
            self._wake = []

    def _help(self, thread: int, wake: threading.Lock) -> None:
        while True:
            wake.acquire()
            job = self._job
            if job is None:
                return
            job(thread)


class FusedStep:
    """Steps of one model, of any mix of decodes and prompt chunks. A token's logits do not depend on what else is in
    its step."""

    def __init__(
        self,
        weights: DecoderWeights,
        heads: HeadShape,
        eps: float,
        rotations: Tensor,
        kv_cache: Tensor | list[Int8Cache],
        num_threads: int | None = None,
    ) -> None:
        self._kernels = kernels()
        self._team = Team(num_threads or torch.get_num_threads())
        self._heads = heads
        self._vocab_size, self._hidden_size = weights.head.shape
        self._intermediate_size = weights.layers[0].down.shape[1]
        # Native code holds only addresses: these keep what lies there alive.
        self._weights, self._rotations = weights, rotations.contiguous()
        self._kv_cache = [layer.numbers if isinstance(layer, Int8Cache) else layer for layer in kv_cache]
        kv_heads = self._kv_cache[0]
        self._layers = np.zeros(len(weights.layers), LAYER)
        for i, layer in enumerate(weights.layers):
            for name, weight in layer._asdict().items():
                self._layers[i][name] = 0 if weight is None else _address(weight)
                if name in ("qkv", "output", "gate_up", "down"):
                    self._layers[i][f"{name}_kind"] = _kind(weight)
            self._layers[i]["kv_cache"] = _address(self._kv_cache[i])
            self._layers[i]["index"] = i
        group = heads.num_heads // heads.num_kv_heads
        self._tile_tokens = max(1, QUERIES // group)
        most = max(QUERIES, group)
        attended = most * (2 * heads.head_dim + 2 + KEYS) + KEYS * heads.head_dim
        widest = max(self._hidden_size, self._intermediate_size, heads.q_size)
        scratch = max(attended, RUN_TOKENS * widest, SCRATCH_FLOATS)
        self._scratch = torch.empty(self._team.num_threads, -(-scratch // 64) * 64)
        self._jobs = np.zeros(1, JOB)
        self._set(
            cells=self._team.cells_address,
            num_threads=self._team.num_threads,
            scratch=_address(self._scratch),
            scratch_stride=self._scratch.stride(0) * 4,
            hidden_size=self._hidden_size,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            intermediate_size=self._intermediate_size,
            vocab_size=self._vocab_size,
            num_layers=len(weights.layers),
            block_size=kv_heads.shape[1],
            kv_kind=_KV_KINDS[kv_heads.dtype],
            kv_head_bytes=kv_heads.shape[-1] * kv_heads.itemsize,
            embedding=_address(weights.embedding),
            embedding_kind=_kind(weights.embedding),
            norm=_address(weights.norm),
            head=_address(weights.head),
            head_kind=_kind(weights.head),
            rotations=_address(self._rotations),
            eps=eps,
            scale=heads.scale,
        )
        self._reserved_tokens = self._reserved_parts = self._reserved_ranks = 0
        self._adapters: WeakKeyDictionary[AdapterWeights, _AdapterPlaces] = WeakKeyDictionary()

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        rows: Tensor | None = None,
        adapted: Sequence[AdaptedRun] = (),
        input_embeds: InputEmbeds | None = None,
    ) -> Tensor:
        """The logits of the step's tokens, or of those at `rows`. Writes keys and values at batch.slots."""
        rows = torch.arange(len(tokens)) if rows is None else rows
        return self.with_hidden(tokens, positions, batch, rows, _NONE, adapted, input_embeds)[0]

    def with_hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        rows: Tensor,
        hidden_rows: Tensor,
        adapted: Sequence[AdaptedRun] = (),
        input_embeds: InputEmbeds | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The logits of the tokens at `rows`, and the final hidden states of those at `hidden_rows`."""
        if len(tokens) == 0:
            return torch.empty(0, self._vocab_size), torch.empty(0, self._hidden_size)
        embeds_at, values = (
            (_NONE, _NONE) if input_embeds is None else (input_embeds.at, input_embeds.values.float().contiguous())
        )
        inputs = [
            t.to(torch.int64).contiguous()
            for t in (tokens, positions, batch.slots, batch.block_tables, rows, hidden_rows, embeds_at)
        ]
        items = np.array(list(_attention_items(batch, self._tile_tokens)), ITEM)
        run_tokens, runs, max_rank = self._runs(adapted)
        num_parts = int(items["part"].max(initial=-1)) + 1
        self._check(batch, *inputs)
        if values.numel() != len(embeds_at) * self._hidden_size:
            raise IndexError(f"Each of a step's {len(embeds_at)} input embeds must have {self._hidden_size} values.")
        logits = torch.empty(len(rows), self._vocab_size)
        hidden = torch.empty(len(hidden_rows), self._hidden_size)

        def prepare() -> list[int]:
            self._reserve(len(tokens), num_parts, len(run_tokens) * max_rank)
            self._set(
                claims=self._team.claims,
                num_tokens=len(tokens),
                tokens=_address(inputs[0]),
                positions=_address(inputs[1]),
                slots=_address(inputs[2]),
                tables=_address(inputs[3]),
                table_stride=inputs[3].shape[1],
                num_items=len(items),
                num_parts=num_parts,
                outputs=_address(inputs[4]),
                num_outputs=len(rows),
                logits=_address(logits),
                hidden_at=_address(inputs[5]),
                num_hidden=len(hidden_rows),
                hidden=_address(hidden),
                embeds_at=_address(inputs[6]),
                num_embeds=len(embeds_at),
                embeds=_address(values),
                num_runs=len(runs),
                run_tokens=run_tokens.ctypes.data,
                shrunk_stride=max_rank,
            )
            return [array.ctypes.data for array in (self._jobs, self._layers, items, runs)]

        self._run(prepare, len(tokens))
        return logits, hidden

    def _run(self, prepare: Callable[[], list[int]], num_tokens: int) -> None:
        """Compute a step of so many tokens, of which native code is told what `prepare` returns."""

        def make_job() -> Job:
            told = prepare()
            return lambda thread: self._kernels.step(*told, thread)

        self._team.run(make_job)

    def close(self) -> None:
        self._team.close()

    def lay_out(self, adapter: AdapterWeights) -> None:
        """Lay out an adapter as native code reads it. The first step that has it would do so, and take longer."""
        self._adapters[adapter] = _AdapterPlaces(adapter)

    def _runs(self, adapted: Sequence[AdaptedRun]) -> tuple[NDArray[np.int64], NDArray[np.void], int]:
        """Return the tokens that have adapters, those with the same one together, the runs of them as items of `RUN`,
        short enough for every thread to have some of a prompt, and the highest rank."""
        groups: dict[AdapterWeights, list[int]] = {}
        for run in adapted:
            groups.setdefault(run.weights, []).extend(range(run.first, run.first + run.num_tokens))
        tokens: list[int] = []
        runs: list[tuple[int, int, int]] = []
        for adapter, found in groups.items():
            own = sorted(found)
            if adapter not in self._adapters:
                self.lay_out(adapter)
            address = self._adapters[adapter].address
            pieces = range(0, len(own), RUN_TOKENS)
            runs += ((len(tokens) + first, min(RUN_TOKENS, len(own) - first), address) for first in pieces)
            tokens += own
        max_rank = max((self._adapters[adapter].max_rank for adapter in groups), default=0)
        return np.array(tokens, np.int64), np.array(runs, RUN), max_rank

    def _check(
        self, batch: AttentionBatch, tokens: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, rows: Tensor,
        hidden_rows: Tensor, embeds_at: Tensor,
    ) -> None:  # fmt: skip
        """Native code reads and writes where it is told to: nothing may point outside."""
        num_blocks, block_size = self._kv_cache[0].shape[:2]
        limits = (
            ("tokens", tokens, self._vocab_size),
            ("positions", positions, len(self._rotations)),
            ("slots", slots, num_blocks * block_size),
            ("block tables", tables, num_blocks),
            ("rows", rows, len(tokens)),
            ("rows of hidden states", hidden_rows, len(tokens)),
            ("places of input embeds", embeds_at, len(tokens)),
        )
        for name, tensor, limit in limits:
            values = tensor.numpy()
            if values.min(initial=0) < 0 or values.max(initial=0) >= limit:
                raise IndexError(f"The {name} of a step must be from 0 to {limit - 1}.")
        if not len(tokens) == len(positions) == len(slots) == batch.query_starts[-1]:
            raise IndexError("A step's tokens, positions and slots must be as many as its sequences' new tokens.")
        if len(rows) > len(tokens):
            raise IndexError("A step has no more rows of logits than tokens.")
        if int(batch.lengths.max()) > tables.shape[1] * block_size:
            raise IndexError("A sequence is longer than its block table.")

    def _set(self, **fields: float) -> None:
        for name, value in fields.items():
            self._jobs[0][name] = value

    def _reserve(self, num_tokens: int, num_parts: int, num_ranks: int) -> None:
        """Room for what passes between a layer's parts."""
        heads = self._heads
        if num_tokens > self._reserved_tokens:
            self._reserved_tokens = num_tokens
            sizes = {
                "residual": self._hidden_size,
                "x": self._hidden_size,
                "y": self._hidden_size,
                # Twice: see `phases.qkv`.
                "qkv": 2 * (heads.q_size + heads.kv_size),
                "attended": heads.q_size,
                "gate_up": 2 * self._intermediate_size,
                "gated": self._intermediate_size,
            }
            self._buffers = {name: torch.empty(num_tokens, size) for name, size in sizes.items()}
            widest = max(2 * sizes["x"], sizes["attended"], sizes["gated"])
            self._buffers["numbers"] = torch.empty(num_tokens, widest, dtype=torch.int8)
            for name in ("scales", "sums"):
                self._buffers[name] = torch.empty(num_tokens, -(-widest // INPUT_GROUP))
            self._set(**{name: _address(buffer) for name, buffer in self._buffers.items()})
        if num_parts > self._reserved_parts:
            self._reserved_parts = num_parts
            self._parts = torch.empty(num_parts, heads.num_heads, heads.head_dim + 2)
            self._set(parts=_address(self._parts))
        if num_ranks > self._reserved_ranks:
            self._reserved_ranks = num_ranks
            self._shrunk = torch.empty(num_ranks)
            self._set(shrunk=_address(self._shrunk))


class RankStep(FusedStep):
    """The steps of one rank of several, cut where its part of a layer's output meets those of others."""

    def __init__(
        self,
        weights: DecoderWeights,
        heads: HeadShape,
        eps: float,
        rotations: Tensor,
        kv_cache: Tensor | list[Int8Cache],
        ranks: RankWork,
    ) -> None:
        super().__init__(weights, heads, eps, rotations, kv_cache)
        self._part = part_of_step()
        self._ranks = ranks
        self._embedded = _NONE

    def with_hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        rows: Tensor,
        hidden_rows: Tensor,
        adapted: Sequence[AdaptedRun] = (),
        input_embeds: InputEmbeds | None = None,
    ) -> tuple[Tensor, Tensor]:
        self._embedded = self._ranks.embed(tokens, input_embeds)
        logits, hidden = super().with_hidden(torch.zeros_like(tokens), positions, batch, rows, hidden_rows, adapted)
        return self._ranks.gathered(logits), hidden

    def _run(self, prepare: Callable[[], list[int]], num_tokens: int) -> None:
        told = prepare()
        residual, product = (self._buffers[name][:num_tokens] for name in ("residual", "y"))
        residual.copy_(self._embedded)
        last = 2 * len(self._layers)
        for number in range(last + 1):
            before = residual.clone()

            def make_job(number: int = number) -> Job:
                self._set(claims=self._team.claims)
                return lambda thread: self._part(*told, number, thread)

            self._team.run(make_job)
            if number < last:
                # The part has added its own product to the residual, and that of all ranks is wanted.
                self._ranks.all_reduce(product)
                torch.add(before, product, out=residual)


def attends_over(kv_cache: KvCache) -> TypeGuard[Tensor | list[Int8Cache]]:
    """Return whether the native step has kernels for a cache of this type."""
    if isinstance(kv_cache, Tensor):
        return kv_cache.dtype in (torch.float32, torch.float16) and kv_cache.is_contiguous()
    return isinstance(kv_cache[0], Int8Cache)


def _attention_items(batch: AttentionBatch, tile_tokens: int) -> Iterator[tuple[int, ...]]:
    """The attention of a step as items of `ITEM`. A decode's long run of keys is cut into parts, so that one sequence
    alone keeps every thread busy; where it is cut does not depend on what else is in the step."""
    part = 0
    starts = batch.query_starts.tolist()
    for sequence, length in enumerate(batch.lengths.tolist()):
        start, stop = starts[sequence], starts[sequence + 1]
        first_position = length - (stop - start)
        if stop - start == 1 and length > KEYS:
            for first in range(0, length, KEYS):
                yield start, 1, sequence, first, min(length, first + KEYS), first_position, part
                part += 1
            continue
        for token in range(start, stop, tile_tokens):
            count = min(tile_tokens, stop - token)
            position = first_position + token - start
            yield token, count, sequence, 0, position + count, position, -1


class _AdapterPlaces:
    """The matrices of an adapter as native code reads them: as halves where no number changes by it."""

    def __init__(self, adapter: AdapterWeights) -> None:
        self.max_rank = -(-adapter.max_rank // 4) * 4
        self._matrices: list[Tensor] = []
        self._places = np.array([[self._place(one) for one in layer] for layer in adapter.layers], np.int64)

    @property
    def address(self) -> int:
        return int(self._places.ctypes.data)

    def _place(self, added: LowRank | None) -> list[int]:
        """Return the fields that `job.PLACE_FIELDS` counts."""
        if added is None:
            return [0] * PLACE_FIELDS
        rank = len(added.shrink)
        is_half = all(torch.equal(matrix.half().float(), matrix.float()) for matrix in (added.shrink, *added.expand))
        kind = torch.float16 if is_half else torch.float32
        fields = [rank, is_half, self._kept(_padded(added.shrink, 4) if is_half else added.shrink, kind)]
        begin = first_rank = 0
        for part in added.expand:
            size, rank = part.shape
            rows = _padded(part, LANES)
            panels = rows.view(len(rows) // LANES, LANES, rank).transpose(1, 2)
            fields += (begin, begin + size, first_rank, rank, self._kept(panels, kind))
            begin, first_rank = begin + size, first_rank + rank
        return fields + [0] * (PLACE_FIELDS - len(fields))

    def _kept(self, matrix: Tensor, kind: torch.dtype) -> int:
        self._matrices.append(matrix.to(kind).contiguous())
        return self._matrices[-1].data_ptr()


def _padded(matrix: Tensor, multiple: int) -> Tensor:
    """Add rows of zeros up to a multiple."""
    return torch.nn.functional.pad(matrix, (0, 0, 0, -len(matrix) % multiple))


def _address(weight: Weight) -> int:
    return _tensor(weight).data_ptr()


def _kind(weight: Weight) -> int:
    return FORMATS.index(weight.format) + 1 if isinstance(weight, QuantisedWeight) else 0


def _tensor(weight: Weight) -> Tensor:
    match weight:
        case QuantisedWeight():
            return weight.panels
        case Tensor():
            return weight
    raise TypeError(f"{type(weight).__name__} is for other devices")
