"""The LoRA adapters of a worker: those on the device, and the rows that use them.

A thread reads them from files, and the engine's own thread copies them to the device: no other thread may allocate
there while a graph is captured.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from weakref import WeakValueDictionary

import torch

from weft.errors import ModelError
from weft.kernels.weights import AdaptedRun, AdapterWeights
from weft.model.dense import DenseModel
from weft.model.dense_lora import AdaptedTokens
from weft.model.lora import read_adapter
from weft.options import SchedulerOptions
from weft.plan import StepPlan
from weft.types import Adapter
from weft.worker.inputs import Layout, to_device
from weft.worker.rows import runs

log = logging.getLogger(__name__)

MAX_ADAPTERS = SchedulerOptions().max_loras


class LoraRows:
    """The adapters on the device, at most `max_adapters` of them, and the rows that use them."""

    def __init__(self, model: DenseModel, max_adapters: int = MAX_ADAPTERS) -> None:
        self._config = model.config
        self._dtype = model.weights.dtype
        self._device = model.weights.device
        self._max_adapters = max_adapters
        self._loaded: OrderedDict[int, AdapterWeights] = OrderedDict()
        """Adapters on the device by number, the most recently used last."""
        self._read: WeakValueDictionary[int, Future[AdapterWeights]] = WeakValueDictionary()
        """Adapters that waiting requests need."""
        self._rows: dict[int, AdapterWeights] = {}
        self._reader = ThreadPoolExecutor(1, "weft-adapters")

    @property
    def numbers(self) -> list[int]:
        """The numbers of the adapters on the device."""
        return list(self._loaded)

    def read(self, adapter: Adapter) -> Future[AdapterWeights]:
        """Read an adapter, if it is not on the device; the future raises ModelError when it cannot be used."""
        known = self._read.get(adapter.number)
        if adapter.number in self._loaded:
            known = Future()
            known.set_result(self._loaded[adapter.number])
        elif known is None or (known.done() and known.exception() is not None):
            known = self._reader.submit(read_adapter, Path(adapter.path), self._config, self._dtype)
        self._read[adapter.number] = known
        return known

    def place(self, adapter: Adapter, weights: AdapterWeights, in_use: Collection[int]) -> bool:
        """Copy an adapter to the device, in place of the least recently used one if there are too many; returns False
        if all are in use."""
        if adapter.number not in self._loaded:
            while len(self._loaded) >= self._max_adapters:
                idle = next((number for number in self._loaded if number not in in_use), None)
                if idle is None:
                    return False
                del self._loaded[idle]
            try:
                self._loaded[adapter.number] = weights.to(self._device)
            except torch.OutOfMemoryError as error:
                raise ModelError(f"There is no memory for the adapter {adapter.name}: {error}") from error
            log.info("The adapter %s takes %.1f MiB.", adapter.name, weights.num_bytes / 2**20)
        self._loaded.move_to_end(adapter.number)
        return True

    def take_in(self, plan: StepPlan) -> None:
        for row in plan.release:
            self._rows.pop(row, None)
        for admission in plan.admit:
            self._rows.pop(admission.row, None)
            if admission.adapter is not None:
                self._rows[admission.row] = self._loaded[admission.adapter]

    def are_used_by(self, plan: StepPlan) -> bool:
        return bool(self._rows) and any(row.row in self._rows for row in plan.rows)

    def runs_in(self, layout: Layout) -> list[AdaptedRun]:
        """Return the runs of a step's tokens that have adapters, in their order."""
        found: list[AdaptedRun] = []
        for row, first in zip(layout.rows, layout.firsts.tolist(), strict=True):
            weights = self._rows.get(row.row)
            if weights is None:
                continue
            last = found[-1] if found else None
            if last is not None and last.weights is weights and last.first + last.num_tokens == first:
                found[-1] = last._replace(num_tokens=last.num_tokens + row.count)
            else:
                found.append(AdaptedRun(weights, first, row.count))
        return found


def tokens_of(adapted: Sequence[AdaptedRun], device: torch.device) -> list[AdaptedTokens]:
    """Return the places of the tokens of runs, by adapter."""
    by_adapter: dict[AdapterWeights, list[AdaptedRun]] = {}
    for run in adapted:
        by_adapter.setdefault(run.weights, []).append(run)
    arrays = [runs([run.first for run in of], [run.num_tokens for run in of]) for of in by_adapter.values()]
    return [AdaptedTokens(*one) for one in zip(by_adapter, to_device(arrays, device), strict=True)]
