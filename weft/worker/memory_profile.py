"""The memory profile: the largest step that the limits allow is computed once, before the KV cache is allocated, to
measure what it takes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch
from msgspec.structs import replace

from weft.engine_stats import MemoryLedger
from weft.errors import OutOfMemory
from weft.kernels.kv_cache import zero_cache
from weft.machine.hardware import read_memory, resident_bytes
from weft.machine.memory import GIB, DeviceMemory, Shape, safe_share
from weft.model.dense import DenseModel
from weft.options import CacheOptions
from weft.plan import Denoise, DenoiseAdmission, ImageLimits, Limits, PlacedEmbeds, Row, RowAdmission, StepPlan
from weft.types import MAX_LOGPROBS, ImageParams, SamplingParams
from weft.worker.diffusion.denoiser import Denoiser
from weft.worker.forward_step import Stepper
from weft.worker.rows import RowTable
from weft.worker.runner import Runner

log = logging.getLogger(__name__)


def cache_shape(config: Shape, num_blocks: int, block_size: int) -> tuple[int, ...]:
    return (config.num_layers, num_blocks, block_size, 2, config.num_kv_heads, config.head_dim)


def available_cpu_bytes() -> int:
    """Return the bytes that this process may still take: the machine's free memory, or what a lower limit leaves."""
    return read_memory().available


def memory_usage(device: torch.device) -> tuple[int, int]:
    """Return the bytes that are in use now, and those that this process keeps: by the device's allocator, or the
    kernel."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    resident = resident_bytes(os.getpid())
    return resident, resident


def gpu_share(cache: CacheOptions) -> float:
    """Return the share of a GPU that is taken; a lowered one is logged."""
    share, asked = safe_share(cache), cache.gpu_memory_utilization
    if share != asked:
        log.warning(
            "--gpu-memory-utilization %g leaves too little for what a step may need beyond its measure: %g is used. "
            "--insist-gpu-memory takes %g.",
            asked,
            share,
            asked,
        )
    return share


def ledger_table(ledger: MemoryLedger) -> str:
    """Return the ledger as lines of text."""
    shown = {
        "weights": ledger.weights,
        "activations": ledger.activations,
        "graphs": ledger.graphs,
        "KV cache": ledger.kv,
        "others": ledger.others,
        "spare": ledger.spare,
        "total": ledger.total,
    }
    return "\n".join(f"  {name:<12}{size / GIB:8.2f} GiB {size / ledger.total:7.1%}" for name, size in shown.items())


COSTLIEST = SamplingParams(
    temperature=1.0, top_p=0.9, seed=0, presence_penalty=0.1, repetition_penalty=1.1, logprobs=MAX_LOGPROBS
)


def measured(
    room: DeviceMemory,
    models: Sequence[DenseModel],
    table: RowTable,
    limits: Limits,
    kv_dtype: torch.dtype,
    *,
    denoiser: Denoiser | None = None,
) -> DeviceMemory:
    """Return the memory of a GPU as measured once weights and tables are allocated, those of the image model too, and
    the largest steps were computed by each of the models."""
    device, plan = table.device, largest_step(limits)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        for model in models:
            compute(plan, model, table, kv_dtype)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"A step of {plan.num_tokens} tokens of {len(plan.rows)} requests does not fit beside the weights: {error}",
            hint=f"Set --max-num-batched-tokens {plan.num_tokens // 2} and --max-num-seqs {len(plan.rows) // 2 or 1}.",
        ) from error
    if denoiser is not None and limits.image is not None:
        for plan in largest_image_steps(limits.max_num_batched_tokens, limits.image):
            try:
                denoise(plan, denoiser)
            except torch.OutOfMemoryError as error:
                raise OutOfMemory(
                    f"A step that has to {plan.denoise[0].stage} {len(plan.denoise)} images does not fit beside the "
                    f"weights: {error}",
                    hint="Set a lower --max-num-images, or --image-model none.",
                ) from error
    # What the allocator reserved, not what tensors filled of it: the KV cache cannot have any of it.
    reserved = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return replace(
        room,
        others=others,
        libraries=max(0, others - room.others),
        activations=reserved
        - sum(model.weights.num_bytes for model in models)
        - (denoiser.num_bytes if denoiser is not None else 0),
    )


def largest_step(limits: Limits) -> StepPlan:
    """Return a plan in which every row samples, in the costliest way. The first rows are prefills, which take all
    tokens that the budget leaves; the last row is at the end of the context, so that block tables are as wide as they
    get."""
    counts = [1] * limits.max_num_seqs
    longest = min(limits.max_prefill_chunk, limits.max_model_len - 1)
    left = limits.max_num_batched_tokens - len(counts)
    for row in range(len(counts)):
        more = min(left, longest - 1)
        counts[row] += more
        left -= more
    starts = [0] * len(counts)
    starts[-1] = limits.max_model_len - 1 - counts[-1]
    # Without blocks, everything is written to the null block.
    rows = [Row(i, start, count, [], True) for i, (start, count) in enumerate(zip(starts, counts, strict=True))]
    admit = [RowAdmission(row.row, [0] * (row.start + row.count), 1, COSTLIEST, []) for row in rows]
    return StepPlan(-1, [], admit, rows)


def largest_image_steps(budget: int, limits: ImageLimits) -> list[StepPlan]:
    """Return a step of each kind of units, for as many images as fit. Without a VAE denoise steps show the images."""
    image = ImageParams(width=limits.width, height=limits.height, steps=1, guidance_scale=2.0, seed=0)
    units = [Denoise(0, 0, 1, limits.cost(image), not limits.decode_cost)]
    if limits.encode_cost:
        units.append(Denoise(0, 0, 0, limits.encode_cost, False, "encode"))
    if limits.decode_cost:
        units.append(Denoise(0, 0, 0, limits.decode_cost, True, "decode"))
    plans = []
    for unit in units:
        slots = range(max(1, min(limits.max_num_images, budget // unit.cost)))
        admit = [DenoiseAdmission(slot, image, PlacedEmbeds(), PlacedEmbeds()) for slot in slots]
        plans.append(StepPlan(-1, [], [], [], [], admit, [replace(unit, slot=slot) for slot in slots]))
    return plans


@torch.inference_mode()
def denoise(plan: StepPlan, denoiser: Denoiser) -> None:
    """Do the units of a plan, and release its images."""
    denoiser.take_in(plan)
    denoiser.denoise(plan.denoise).read()
    denoiser.take_in(StepPlan(plan.step_id, [], [], [], release_slots=[one.slot for one in plan.denoise]))


def compute(plan: StepPlan, model: DenseModel, table: RowTable, kv_dtype: torch.dtype) -> None:
    """Compute a step with a cache of the null block alone, and release its rows."""
    cache = zero_cache(cache_shape(model.config, 1, table.block_size), kv_dtype, table.device)
    Runner(Stepper(model, cache, table)).execute(plan).result()
    table.take_in(StepPlan(plan.step_id, [row.row for row in plan.rows], [], []))
