"""The ranks of a model as each of their processes sees them: their collective operations, and the runners of the first
rank, which leads, and of the others, which follow it.

All that is not the decoder belongs to the first rank: scheduler, sampler, grammars, draft model and image model. The
others compute their part of each forward pass, and are given the tokens that the first has sampled or drafted.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from weft.errors import ConfigError, EngineFault
from weft.kernels.triton import has_triton
from weft.kernels.weights import AdapterWeights
from weft.model.lora import read_adapter
from weft.model.shard import Shard
from weft.model.sharded_dense import ShardedDense
from weft.plan import Row, StepPlan
from weft.switches import SHARED_GPU, is_on
from weft.types import Adapter, SamplingParams
from weft.worker.diffusion.denoiser import Denoiser
from weft.worker.draft_model import DraftModel
from weft.worker.forward_step import ForwardOutput, Stepper
from weft.worker.grammar_masks import Masks
from weft.worker.graphs import StepGraphs
from weft.worker.inputs import to_device
from weft.worker.lora_rows import LoraRows
from weft.worker.runner import Deferred, Pending, Runner, WarmUp
from weft.worker.sampler import DraftedTokens, SampledBatch

if TYPE_CHECKING:
    from weft.kernels.triton.all_reduce import OneShot

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


class PlaceAdapter(Struct, frozen=True, tag=True):
    """Load an adapter, or mark it as the most recently used; `in_use` are the numbers of those that must stay."""

    adapter: Adapter
    in_use: list[int]


class FollowStep(Struct, frozen=True, tag=True):
    plan: StepPlan


class Prepare(Struct, frozen=True, tag=True):
    """Do the next piece of warm-up."""


ToRank = FollowStep | PlaceAdapter | Prepare
"""The messages of the first rank to the others, which carry them out in their order."""


class RankGroup:
    """The ranks of one model, as one of them sees them. Sockets of the group are on the loopback interface alone."""

    def __init__(self, rank: int, size: int, store_port: int, *, listener: socket.socket | None = None) -> None:
        """Make a group whose first rank has the `listener` of the store, over which the ranks find each other."""
        self.shard = Shard(rank, size)
        self._store_port = store_port
        self._listener = listener
        self._one_shot: OneShot | None = None
        self.tell: Callable[[ToRank], None] = lambda message: None
        """Called by the first rank, sends a message to all others."""

    def connect(self, device: torch.device, timeout_s: float) -> None:
        """Wait until all ranks are connected."""
        # Only a rank may know the others' addresses, and they are all on this machine.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")
        if device.type == "cuda" and _shares_gpu(self.shard.size):
            # NCCL refuses two ranks of one host on one GPU.
            os.environ["NCCL_HOSTID"] = f"weft-rank-{self.shard.rank}"
        listener, self._listener = self._listener, None
        store = dist.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK,
            self._store_port,
            self.shard.size,
            is_master=listener is not None,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None else None,
        )
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=self.shard.rank,
            world_size=self.shard.size,
            timeout=timedelta(days=1),
            device_id=device if device.type == "cuda" else None,
        )
        if device.type == "cuda" and has_triton() and is_on("one-shot"):
            self._one_shot = self._opened(store, device)

    def _opened(self, store: Any, device: torch.device) -> OneShot | None:
        """Return the one-shot all-reduce; None on all ranks where one cannot reach the memory of another."""
        from weft.kernels.triton.all_reduce import OneShot, PeerMemory, inbox_bytes

        rank, size = self.shard.rank, self.shard.size
        memory = PeerMemory(inbox_bytes(size))
        store.set(f"inbox {rank}", memory.handle())
        handles = [store.get(f"inbox {one}") for one in range(size)]
        try:
            addresses = [memory.own if one == rank else memory.open(handle) for one, handle in enumerate(handles)]
        except OSError as error:
            log.warning("Ranks add up by NCCL alone, since one cannot reach the memory of another: %s.", error)
            addresses = []
        if not self.least(device, len(addresses))[0]:
            return None
        return OneShot(rank, torch.tensor(addresses, dtype=torch.int64, device=device))

    def close(self) -> None:
        # NCCL would wait for the other ranks and for graphs; the process ends with all that it holds.
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()

    def all_reduce(self, tensor: Tensor, residual: Tensor | None = None) -> None:
        if self._one_shot is not None and self._one_shot.takes(tensor, residual):
            self._one_shot.all_reduce(tensor, residual)
            return
        if tensor.numel():
            dist.all_reduce(tensor)
        if residual is not None:
            residual.add_(tensor)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        is_first = self.shard.rank == 0
        parts = [torch.empty_like(tensor) for _ in range(self.shard.size)] if is_first else []
        if tensor.numel():
            dist.gather(tensor, parts if is_first else None, dst=0)
        return parts

    def least(self, device: torch.device, *numbers: int) -> list[int]:
        """Return the least of each of the ranks' numbers."""
        least = torch.tensor(numbers, device=device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return [int(number) for number in least.tolist()]

    def agree(self, device: torch.device, is_so: bool) -> bool:
        """Return whether it is so on all ranks."""
        return self.least(device, int(is_so)) == [1]

    def share_tokens(self, tokens: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Write the first rank's tokens at these places of a row table to the others' tables."""
        shared = tokens[rows, positions]
        dist.broadcast(shared, src=0)
        if self.shard.rank:
            tokens[rows, positions] = shared


def rank_device(device: torch.device, shard: Shard) -> torch.device:
    """Return the device of a rank: a CPU is everyone's, and each has a GPU of its own."""
    if device.type != "cuda" or shard.size == 1:
        return device
    if torch.cuda.device_count() < shard.size and not _shares_gpu(shard.size):
        raise ConfigError(
            f"--tensor-parallel-size {shard.size} needs as many GPUs; torch sees {torch.cuda.device_count()}.",
            hint="Set a lower one, or --device cpu.",
        )
    own = torch.device("cuda", shard.rank % torch.cuda.device_count())
    torch.cuda.set_device(own)
    return own


def _shares_gpu(num_ranks: int) -> bool:
    return torch.cuda.device_count() < num_ranks and SHARED_GPU in os.environ


class ShardedLoraRows(LoraRows):
    """The adapters of one rank: its part of each. The first rank says which the others load."""

    def __init__(self, stepper: Stepper, group: RankGroup, max_adapters: int, rank: int) -> None:
        super().__init__(stepper, max_adapters, rank)
        self._group = group

    def place(self, adapter: Adapter, weights: AdapterWeights, in_use: Collection[int]) -> bool:
        is_placed = super().place(adapter, weights, in_use)
        if is_placed:
            self._group.tell(PlaceAdapter(adapter, sorted(in_use)))
        return is_placed

    def _read_files(self, folder: Path) -> AdapterWeights:
        model = self._model
        assert isinstance(model, ShardedDense)
        return read_adapter(folder, model.whole, model.weights.dtype, model.shard)


class ShardedRunner(Runner):
    """The runner of one rank. Tokens come from the first rank, whose sampler has all logits."""

    def __init__(
        self,
        stepper: Stepper,
        group: RankGroup,
        adapters: LoraRows,
        *,
        graphs: StepGraphs | None = None,
        warm_up: WarmUp | None = None,
        draft_model: DraftModel | None = None,
        denoiser: Denoiser | None = None,
    ) -> None:
        super().__init__(
            stepper, graphs=graphs, warm_up=warm_up, draft_model=draft_model, denoiser=denoiser, adapters=adapters
        )
        self._group = group

    def _drafts(self, rows: Tensor, positions: Tensor) -> DraftedTokens:
        self._group.share_tokens(self.stepper.table.tokens, rows, positions)
        return super()._drafts(rows, positions)

    def _share_sampled(self, sampling: list[Row]) -> None:
        table = self.stepper.table
        places = [[row.row for row in sampling], [row.start + row.count for row in sampling]]
        rows, positions = to_device([np.array(one, dtype=np.int64) for one in places], table.device)
        self._group.share_tokens(table.tokens, rows, positions)


@contextmanager
def no_way_back() -> Iterator[None]:
    """Let a shortage of memory end the engine: a step that other ranks have begun cannot be taken back."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineFault(
            f"There is no memory for a step of several ranks: {error}", hint="Set a lower --max-num-batched-tokens."
        ) from error


class LeadingRunner(ShardedRunner):
    """The runner of the first rank, which tells the others of each plan before it executes it."""

    def execute(self, plan: StepPlan) -> Pending | Deferred:
        if plan.rows or plan.release or plan.admit:
            self._group.tell(FollowStep(followed(plan)))
        with no_way_back():
            return super().execute(plan)

    def _prepare_steps(self) -> bool:
        self._group.tell(Prepare())
        with no_way_back():
            return super()._prepare_steps()

    def _sampled(
        self, rows: list[Row], output: ForwardOutput, drafts: DraftedTokens | None, masks: Masks | None = None
    ) -> SampledBatch | None:
        with no_way_back():
            sampled = super()._sampled(rows, output, drafts, masks)
            if rows:
                self._share_sampled(rows)
            return sampled


class FollowingRunner(ShardedRunner):
    @torch.inference_mode()
    def follow(self, message: ToRank) -> None:
        """Carry out a message of the first rank."""
        match message:
            case FollowStep(plan=plan):
                self.adapters.take_in(plan)
                launched = self._launch(plan)
                if launched is not None and launched.sampling:
                    self._share_sampled(launched.sampling)
            case Prepare():
                self._prepare_steps()
            case PlaceAdapter(adapter=adapter, in_use=in_use):
                # One that cannot be read here ends this rank, and its engine with it.
                weights = self.adapters.read(adapter).result()
                if not self.adapters.place(adapter, weights, in_use):
                    raise RuntimeError(f"There is no slot for {adapter.name}, which the first rank has loaded.")


NOT_SAMPLED = SamplingParams(temperature=0, seed=0)


def followed(plan: StepPlan) -> StepPlan:
    """Return the part of a plan that ranks follow: without images, and without what only a sampler needs."""
    admit = [replace(admission, params=NOT_SAMPLED, stop_token_ids=[]) for admission in plan.admit]
    return StepPlan(plan.step_id, plan.release, admit, plan.rows)
