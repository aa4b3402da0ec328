"""The LoRA adapters of a worker: those on the device, and the rows that use them.

A thread reads them from files, and the engine's own thread copies them to the device: no other thread may allocate
there while a graph is captured.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch

from weft.errors import ModelError
from weft.kernels.weights import AdaptedRun, AdapterWeights
from weft.machine.memory import slot_rank
from weft.model.dense_lora import AdapterSlots
from weft.model.lora import read_adapter
from weft.options import SchedulerOptions
from weft.plan import StepPlan
from weft.types import Adapter
from weft.worker.forward_step import Stepper
from weft.worker.inputs import Layout

log = logging.getLogger(__name__)

MAX_ADAPTERS = SchedulerOptions().max_loras


class Loaded(NamedTuple):
    """An adapter that rows may use, in the host's memory, and the slot that it has."""

    weights: AdapterWeights
    slot: int


class LoraRows:
    """The adapters that are loaded, at most `max_adapters` of them, and the rows that use them. Native code reads them
    where they are; other steps read slots, which are allocated for the first adapter."""

    def __init__(self, stepper: Stepper, max_adapters: int = MAX_ADAPTERS, rank: int = 0) -> None:
        """Make slots, when there are any, for adapters of at least this rank."""
        self.slots: AdapterSlots | None = None
        self._model = stepper.model
        self._fast_step = stepper.fast_step
        self._max_adapters = max_adapters
        self._rank = rank
        self._loaded: OrderedDict[int, Loaded] = OrderedDict()
        """Adapters by number, the most recently used last."""
        self._read: WeakValueDictionary[int, Future[AdapterWeights]] = WeakValueDictionary()
        """Adapters that waiting requests need."""
        self._rows: dict[int, Loaded] = {}
        self._reader = ThreadPoolExecutor(1, "weft-adapters")

    @property
    def numbers(self) -> list[int]:
        """The numbers of the adapters that are loaded."""
        return list(self._loaded)

    def read(self, adapter: Adapter) -> Future[AdapterWeights]:
        """Read an adapter, if it is not loaded; the future raises ModelError when it cannot be used."""
        known = self._read.get(adapter.number)
        if adapter.number in self._loaded:
            known = Future()
            known.set_result(self._loaded[adapter.number].weights)
        elif known is None or (known.done() and known.exception() is not None):
            known = self._reader.submit(self._from_files, Path(adapter.path))
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
            taken = {loaded.slot for loaded in self._loaded.values()}
            loaded = Loaded(weights, min(set(range(self._max_adapters)) - taken))
            try:
                self._fill(loaded)
            except torch.OutOfMemoryError as error:
                raise ModelError(f"There is no memory for the adapter {adapter.name}: {error}") from error
            self._loaded[adapter.number] = loaded
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

    def slots_for(self, plan: StepPlan) -> AdapterSlots | None:
        """Return the slots that a step reads; None for a step without adapters, or in native code."""
        is_adapted = bool(self._rows) and any(row.row in self._rows for row in plan.rows)
        return self.slots if is_adapted else None

    def slot_of(self, row: int) -> int:
        """Return the slot of a row's adapter; -1 for a row without one."""
        return self._rows[row].slot if row in self._rows else -1

    def runs_in(self, layout: Layout) -> list[AdaptedRun]:
        """Return the runs of a step's tokens that have adapters, in their order."""
        found: list[AdaptedRun] = []
        for row, first in zip(layout.rows, layout.firsts.tolist(), strict=True):
            loaded = self._rows.get(row.row)
            if loaded is None:
                continue
            last = found[-1] if found else None
            if last is not None and last.weights is loaded.weights and last.first + last.num_tokens == first:
                found[-1] = last._replace(num_tokens=last.num_tokens + row.count)
            else:
                found.append(AdaptedRun(loaded.weights, first, row.count))
        return found

    def _from_files(self, folder: Path) -> AdapterWeights:
        weights = self._read_files(folder)
        if self._fast_step is not None:
            self._fast_step.lay_out(weights)
        return weights

    def _read_files(self, folder: Path) -> AdapterWeights:
        return read_adapter(folder, self._model.config, self._model.weights.dtype)

    def _fill(self, loaded: Loaded) -> None:
        """Write an adapter to its slot. One of a larger rank than slots have needs all of them anew."""
        if self._fast_step is not None:
            return
        rank = loaded.weights.max_part_rank
        if self.slots is None or rank > self.slots.rank:
            slots = AdapterSlots(self._model, self._max_adapters, slot_rank(max(rank, self._rank)))
            for other in self._loaded.values():
                slots.write(other.slot, other.weights)
            self.slots = slots
        self.slots.write(loaded.slot, loaded.weights)
