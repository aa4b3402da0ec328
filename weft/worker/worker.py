"""The worker loads a model on a device, and allocates its KV cache."""

from __future__ import annotations

import logging
import mmap
import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from typing import cast

import torch
from msgspec.structs import asdict, replace

from weft import logs
from weft.checkpoint.model_files import ModelFiles
from weft.errors import ConfigError
from weft.kernels import ops_for
from weft.kernels.cpu import native_step, panel_layout
from weft.kernels.fp8 import E4M3
from weft.kernels.kv_cache import KvCache, cache_bytes, cache_in, zero_cache
from weft.kernels.panel_format import PanelLayout
from weft.machine.hardware import MemoryGauge
from weft.machine.memory import (
    GIB,
    DeviceMemory,
    MemoryPlan,
    check_shards,
    check_step,
    graphs_bytes,
    num_parameters,
    plan_memory,
    slot_rank,
)
from weft.machine.model_size import Weights, adapters_bytes, largest_rank, quantised_bytes, size_of
from weft.model.dense import DenseModel
from weft.model.loader import GgufSource, LinearLoading, load_weights, open_model
from weft.model.shard import WHOLE
from weft.model.sharded_dense import ShardedDense
from weft.options import CacheOptions, Config
from weft.plan import Limits
from weft.switches import is_on
from weft.types import ModelInfo
from weft.worker.compile_ahead import CompileAhead, FutureSteps, TritonHash
from weft.worker.diffusion.load import load_image_model
from weft.worker.draft_model import DraftModel
from weft.worker.forward_step import FastStep, Stepper
from weft.worker.graphs import StepGraphs, graph_shapes
from weft.worker.lora_rows import LoraRows
from weft.worker.memory_profile import (
    available_cpu_bytes,
    cache_shape,
    gpu_share,
    ledger_table,
    measured,
    memory_usage,
)
from weft.worker.rows import RowTable
from weft.worker.runner import Runner, WarmUp
from weft.worker.tensor_parallel import FollowingRunner, LeadingRunner, RankGroup, ShardedLoraRows, rank_device

log = logging.getLogger(__name__)

DEFAULT_CPU_CACHE_BYTES = 512 * 2**20
STEPS_BEFORE_READY = 2
FIRST_TO_MULTIPLY = {"fp8": (8, 9), "w4a8": (8, 9), "int4": (8, 0), "int8": (8, 0)}
"""The compute capability from which on matrix units multiply e4m3, and bfloat16."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Worker:
    """The worker loads a model and offers what an engine needs to drive it: `limits`, `info`, `memory` and `runner`."""

    def __init__(self, config: Config, files: ModelFiles, ranks: RankGroup | None = None) -> None:
        """Load a model, or with `ranks` this rank's part of it. The draft model and the image model are loaded by the
        first rank alone."""
        began = time.perf_counter()
        shard = ranks.shard if ranks is not None else WHOLE
        device = rank_device(_device(config), shard)
        dtype = _dtype(config, device)
        hashing = TritonHash() if device.type == "cuda" else None
        kv_dtype = _kv_dtype(config, device, dtype)
        if config.model.threads or shard.size > 1:
            torch.set_num_threads(config.model.threads or max(1, torch.get_num_threads() // shard.size))
        room = _room(device, config.cache, shard.size)
        with ExitStack() as opened:
            target = OpenModel(config, files, device, dtype, opened, ranks)
            has_draft = files.draft is not None and shard.rank == 0
            draft = OpenModel(config, files.draft, device, dtype, opened) if files.draft and has_draft else None
            geometry = target.geometry
            if draft is not None:
                _check_draft(target, draft)
            plan_for = partial(
                plan_memory,
                geometry,
                config.cache,
                max_model_len=config.model.max_model_len,
                dtype=dtype,
                kv_memory_bytes=DEFAULT_CPU_CACHE_BYTES if device.type == "cpu" else None,
                draft=draft.geometry if draft is not None else None,
            )
            images = None
            if shard.rank == 0:
                images = load_image_model(config, files, text_width=geometry.hidden_size, dtype=dtype, device=device)
            denoiser = images.denoiser if images is not None else None
            beside_bytes = adapters_bytes(config, dtype, geometry if device.type == "cuda" else None)
            beside_bytes += denoiser.num_bytes if denoiser is not None else 0
            planned_bytes = sum(one.weights_bytes for one in (target, draft) if one is not None)
            # What cannot fit is refused before anything large is allocated.
            plan = plan_for(room, weights_bytes=planned_bytes + beside_bytes)
            if ranks is not None:
                ranks.connect(device, config.engine.start_timeout_s)
                plan = _common(plan, ranks, device)
            self.limits = replace(
                _limits(config, plan, target, device, has_draft_model=draft is not None),
                image=images.limits if images is not None else None,
                embeds_width=geometry.hidden_size if config.limits.allow_prompt_embeds else 0,
                max_embedding_bytes=config.scheduler.max_embedding_mb << 20,
            )
            if target.multiplied in ("fp8", "w4a8"):
                # The library reads it at its first product. Those that it chooses for e4m3 then are up to 9 % faster.
                os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")
            compiling = None
            # The kernels of one rank are those of all.
            is_first = shard.rank == 0
            steps = _future_steps(config, self.limits, kv_dtype, target, draft)
            if hashing is not None and is_first and steps:
                compiling = CompileAhead(steps, torch.cuda.get_device_capability(device), hashing)
            model = target.load(plan.max_model_len)
            draft_model = draft.load(plan.max_model_len) if draft is not None else None
            if compiling is not None:
                # The other ranks know of no compiler.
                compiling.wait_for_largest() if ranks is None else compiling.wait()
            if ranks is not None:
                ranks.least(device, 0)
        models = [one for one in (model, draft_model) if one is not None]
        weights_bytes = sum(one.weights.num_bytes for one in models) + beside_bytes
        table = RowTable(self.limits.max_num_seqs, plan.max_model_len, config.cache.block_size, device)
        on_cpu = device.type == "cpu"
        has_graphs = not on_cpu and is_on("graphs")
        new_graphs = partial(StepGraphs, is_compiled=compiling.is_done) if compiling is not None else StepGraphs
        if device.type == "cuda":
            if has_graphs:
                shapes = graph_shapes(_most_decodes(self.limits))
                # Steps with adapters have graphs of their own.
                # The first rank's graphs have the logits of all.
                widest = replace(geometry, vocab_size=target.whole.vocab_size)
                size = graphs_bytes(widest, dtype, shapes * 2 if config.model.wants_adapters else shapes)
                if draft is not None:
                    shapes = graph_shapes(self.limits.max_speculative_tokens, with_prefills=False)
                    size += graphs_bytes(draft.geometry, dtype, shapes)
                room = replace(room, graphs=size)
            room = measured(room, models, table, self.limits, kv_dtype, denoiser=denoiser)
            plan = plan_for(room, weights_bytes=weights_bytes)
            plan = plan if ranks is None else _common(plan, ranks, device)
            self.limits = replace(self.limits, num_blocks=plan.num_blocks, max_model_len=plan.max_model_len)
        ledger = room.ledger(weights_bytes, plan.kv_bytes)
        steppers = [_stepper(one, plan.num_blocks, table, kv_dtype) for one in models]
        drafter = None
        if draft_model is not None:
            most, stepper = self.limits.max_speculative_tokens, steppers[1]
            drafter = DraftModel(stepper, new_graphs(stepper, most, with_prefills=False) if has_graphs else None)
        slots = config.scheduler.max_loras, largest_rank(config)
        graphs, warm_up = None, None
        if has_graphs:
            agree = partial(ranks.agree, device) if ranks is not None else None
            graphs = new_graphs(steppers[0], _most_decodes(self.limits), agree=agree)
        if not on_cpu:
            # A draft model would part the first rank from the others.
            warm_up = WarmUp(*(steppers if ranks is None else steppers[:1]))
        if ranks is None:
            self.runner = Runner(
                steppers[0],
                graphs=graphs,
                warm_up=warm_up,
                draft_model=drafter,
                denoiser=denoiser,
                adapters=LoraRows(steppers[0], *slots),
            )
        else:
            self.runner = (FollowingRunner if shard.rank else LeadingRunner)(
                steppers[0],
                ranks,
                ShardedLoraRows(steppers[0], ranks, *slots),
                graphs=graphs,
                warm_up=warm_up,
                draft_model=drafter,
                denoiser=denoiser,
            )
        if compiling is not None:
            compiling.wait_for_eager()
            if not has_graphs:
                compiling.wait()
            # Requests that are waiting find the kernels of the first steps loaded.
            for _ in range(STEPS_BEFORE_READY):
                self.runner.prepare()
        if not on_cpu:
            sizes = {f"{name}_gib": round(size / GIB, 3) for name, size in asdict(ledger).items()}
            logs.event(log, logging.INFO, "GPU memory", sizes, table=lambda: ledger_table(ledger).splitlines())
        self.memory = MemoryGauge(partial(memory_usage, device))
        self.info = ModelInfo(
            name=config.model.served_model_name or files.name,
            max_model_len=plan.max_model_len,
            logits_width=self.limits.logits_width,
            num_blocks=plan.num_blocks,
            block_size=config.cache.block_size,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            memory=ledger,
            load_seconds=time.perf_counter() - began,
            images=images.info if images is not None else None,
            embeds_width=self.limits.embeds_width,
        )


def _device(config: Config) -> torch.device:
    wanted = config.model.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: this machine has no CUDA device that torch can use.", hint="Try --device cpu."
        )
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def _dtype(config: Config, device: torch.device) -> torch.dtype:
    if config.model.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[config.model.dtype]


def _kv_dtype(config: Config, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the KV cache."""
    wanted = config.cache.kv_cache_dtype
    if wanted == "auto":
        return dtype
    if wanted != "fp8":
        if device.type != "cpu":
            raise ConfigError(
                f"--kv-cache-dtype {wanted} is for CPUs; on GPUs it can be fp8.",
                hint="Leave it out: the cache has the type of --dtype.",
            )
        return torch.float16 if wanted == "fp16" else torch.int8
    first = FIRST_TO_MULTIPLY["fp8"]
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < first:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "A CPU"
        raise ConfigError(
            f"{name} has no FP8: --kv-cache-dtype fp8 needs an NVIDIA GPU of compute capability {first[0]}.{first[1]}.",
            hint="Leave --kv-cache-dtype out.",
        )
    if dtype == torch.float32:
        raise ConfigError("--kv-cache-dtype fp8 does not go with --dtype float32.", hint="Leave --dtype at auto.")
    return E4M3


class OpenModel:
    """The open files of one model, and how its weights will be held."""

    def __init__(
        self,
        config: Config,
        files: ModelFiles,
        device: torch.device,
        dtype: torch.dtype,
        opened: ExitStack,
        ranks: RankGroup | None = None,
    ) -> None:
        self.files = files
        self._device, self.dtype, self._ranks = device, dtype, ranks
        self.whole, self._source = opened.enter_context(open_model(files))
        self.shard = shard = ranks.shard if ranks is not None else WHOLE
        check_shards(self.whole, shard.size)
        self.geometry = shard.config(self.whole)
        """The geometry of this rank's part."""
        stored = size_of(files, self._source.file if isinstance(self._source, GgufSource) else None).weights
        self._panels = _panels(config, files, device)
        self._linears = _linears(config, stored, device, dtype, has_panels=self._panels is not None)
        self.multiplied = self._linears
        """How linear weights are held once they are loaded; "keep" for those of a GGUF file."""
        self.has_float_head = self._linears in ("keep", "dequantise")
        if self._linears == "keep" and not stored.block_bytes:
            self.multiplied = "fp8" if stored.fp8 else "int8" if stored.int8 else "int4"
        if self._linears != "dequantise":
            quantization = config.backend.quantization
            self.weights_bytes = quantised_bytes(
                self.geometry, stored.shared_by(shard.size), quantization, dtype, on_gpu=device.type == "cuda"
            )
        elif self._panels is None:
            self.weights_bytes = num_parameters(self.geometry) * dtype.itemsize
        else:
            self.weights_bytes = stored.shared_by(shard.size).held_in_panels(dtype)

    def load(self, max_model_len: int) -> DenseModel:
        weights = load_weights(
            self.files, self.whole, self._source,
            dtype=self.dtype, device=self._device, panels=self._panels, linears=self._linears, shard=self.shard,
        )  # fmt: skip
        ops = ops_for(self._device.type)
        if self._ranks is None:
            return DenseModel(self.whole, weights, ops, max_model_len)
        return ShardedDense(self.whole, self.shard, weights, ops, self._ranks, max_model_len)


def _future_steps(
    config: Config, limits: Limits, kv_dtype: torch.dtype, target: OpenModel, draft: OpenModel | None
) -> list[FutureSteps]:
    """Return the steps whose kernels are known before the weights are read: those of all but GGUF files."""
    steps = [
        FutureSteps(
            target.whole,
            target.dtype,
            kv_dtype,
            target.multiplied,
            target.has_float_head,
            limits,
            _most_decodes(limits),
            shard=target.shard,
            num_slots=config.scheduler.max_loras if config.model.wants_adapters else 0,
            slot_rank=slot_rank(largest_rank(config)),
        )
    ]
    if draft is not None:
        most, linears, is_float = limits.max_speculative_tokens, draft.multiplied, draft.has_float_head
        steps.append(
            FutureSteps(draft.geometry, draft.dtype, kv_dtype, linears, is_float, limits, most, with_prefills=False)
        )
    return [one for one in steps if one.linears != "keep"]


def _check_draft(target: OpenModel, draft: OpenModel) -> None:
    ours, theirs = target.whole.vocab_size, draft.whole.vocab_size
    if ours != theirs:
        raise ConfigError(
            f"--speculative-model {draft.files.name} has {theirs} logits, and {target.files.name} has {ours}: a draft "
            "model needs the same vocabulary.",
            hint="Name a smaller model of the same family.",
        )


def _panels(config: Config, files: ModelFiles, device: torch.device) -> PanelLayout | None:
    """Return the layout of quantised weights that stay so; None where they are unpacked, or there are none."""
    is_quantised = files.kind == "gguf" or config.backend.quantization == "int8"
    return panel_layout() if is_quantised and config.model.dtype == "auto" and device.type == "cpu" else None


def _linears(
    config: Config, stored: Weights, device: torch.device, dtype: torch.dtype, *, has_panels: bool
) -> LinearLoading:
    """Return how linear weights are held. Those of quantised checkpoints are dequantised where the device does not
    multiply them, or float32 is asked for."""
    wanted = config.backend.quantization
    if wanted == "int8" and has_panels:
        return "int8"
    kind = wanted or ("fp8" if stored.fp8 else "int4")
    first = FIRST_TO_MULTIPLY[kind]
    can_multiply = device.type == "cuda" and torch.cuda.get_device_capability(device) >= first
    if wanted and (not can_multiply or dtype == torch.float32):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "A CPU"
        raise ConfigError(
            f"--quantization {wanted} does not go with --dtype float32."
            if can_multiply
            else f"{name} does not multiply {wanted.upper() if wanted == 'fp8' else wanted}: --quantization {wanted} "
            f"needs an NVIDIA GPU of compute capability {first[0]}.{first[1]}.",
            hint="Leave --dtype at auto." if can_multiply else "Leave --quantization out.",
        )
    if wanted:
        return cast(LinearLoading, wanted)
    return "keep" if stored.is_quantised and can_multiply and dtype != torch.float32 else "dequantise"


def _common(plan: MemoryPlan, ranks: RankGroup, device: torch.device) -> MemoryPlan:
    """Return the plan that every rank has memory for: block ids are the same on all."""
    num_blocks, max_model_len = ranks.least(device, plan.num_blocks, plan.max_model_len)
    return replace(plan, num_blocks=num_blocks, max_model_len=max_model_len)


def _room(device: torch.device, cache: CacheOptions, num_ranks: int) -> DeviceMemory:
    if device.type == "cpu":
        return DeviceMemory(total=available_cpu_bytes() // num_ranks)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total=total, share=gpu_share(cache), others=total - free)


def _stepper(model: DenseModel, num_blocks: int, table: RowTable, kv_dtype: torch.dtype) -> Stepper:
    """Return the stepper of a model with a KV cache for it."""
    shape = cache_shape(model.config, num_blocks, table.block_size)
    if table.device.type != "cpu":
        return Stepper(model, zero_cache(shape, kv_dtype, table.device), table)
    kv_cache = _kv_cache(shape, kv_dtype)
    return Stepper(model, kv_cache, table, fast_step=_native_step(model, kv_cache))


def _kv_cache(shape: tuple[int, ...], dtype: torch.dtype) -> KvCache:
    """Return a CPU's cache of zeros. It takes memory as it is used, in small pages: a few tokens are in every layer's
    part of a cache, and would take a large page of each, 60 MB for SmolLM2. Steps are as fast."""
    num_bytes = cache_bytes(shape, dtype)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"Unable to allocate {num_bytes / GIB:.1f} GiB for the KV cache: {error.strerror}."
        ) from error
    if sys.platform == "linux":
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return cache_in(torch.frombuffer(pages, dtype=torch.uint8), shape, dtype)


def _limits(
    config: Config, plan: MemoryPlan, target: OpenModel, device: torch.device, *, has_draft_model: bool
) -> Limits:
    options = config.scheduler
    on_cpu = device.type == "cpu"
    max_num_seqs, budget = options.num_seqs(on_cpu=on_cpu), options.num_batched_tokens(on_cpu=on_cpu)
    check_step(budget, max_num_seqs)
    gpu_chunk = 4096 if target.multiplied in ("fp8", "w4a8") else 2048
    return Limits(
        num_blocks=plan.num_blocks,
        block_size=config.cache.block_size,
        max_model_len=plan.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_prefill_chunk=options.max_prefill_chunk or (256 if on_cpu else gpu_chunk),
        max_mixed_prefill=options.max_mixed_prefill or (256 if on_cpu else 384),
        max_step_seconds=(options.max_step_ms or (180 if on_cpu else 0)) / 1000,
        max_mixed_step_seconds=0 if on_cpu else (options.max_step_ms or 50) / 1000,
        logits_width=target.whole.vocab_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        max_preemptions=options.max_preemptions,
        force_preempt_every=options.force_preempt_every,
        speculates=options.speculative == "ngram" or has_draft_model,
        has_draft_model=has_draft_model,
        max_speculative_tokens=12 if on_cpu else 64,
    )


def _most_decodes(limits: Limits) -> int:
    """Return how many tokens the decodes of a captured step may have. Where a request alone asks for drafts, they are
    as many as without."""
    return max(limits.max_num_seqs, limits.max_speculative_tokens if limits.speculates else 0)


def _native_step(model: DenseModel, kv_cache: KvCache) -> FastStep | None:
    ranks = model if isinstance(model, ShardedDense) else None
    return native_step(model.weights, model.config.heads, model.config.norm_eps, model.rotations, kv_cache, ranks)
