"""The worker loads a model on a device, and allocates its KV cache."""

from __future__ import annotations

import logging
import time
from functools import partial

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from weft.checkpoint.model_files import ModelFiles
from weft.errors import ConfigError
from weft.kernels import ops_for
from weft.kernels.cpu import native_step, panel_layout
from weft.kernels.quantised import PanelLayout
from weft.machine.hardware import MemoryGauge
from weft.machine.memory import (
    DeviceMemory,
    MemoryPlan,
    check_step,
    fp8_bytes,
    graphs_bytes,
    num_parameters,
    plan_memory,
)
from weft.machine.model_size import Weights, adapters_bytes, size_of
from weft.model.dense import DenseConfig, DenseModel
from weft.model.loader import Fp8Loading, load_weights, open_model
from weft.options import CacheOptions, Config
from weft.plan import Limits
from weft.switches import is_on
from weft.types import ModelInfo
from weft.worker.diffusion.load import load_image_model
from weft.worker.forward_step import FastStep, Stepper
from weft.worker.graphs import StepGraphs, graph_shapes
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

log = logging.getLogger(__name__)

DEFAULT_CPU_CACHE_BYTES = 512 * 2**20
FIRST_WITH_FP8 = (8, 9)
"""The compute capability from which on matrix units multiply e4m3."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Worker:
    """The worker loads a model and offers what an engine needs to drive it: `limits`, `info`, `memory` and `runner`."""

    def __init__(self, config: Config, files: ModelFiles) -> None:
        began = time.perf_counter()
        device = _device(config)
        dtype = _dtype(config, device)
        if config.model.threads:
            torch.set_num_threads(config.model.threads)
        room = _room(device, config.cache)
        with open_model(files) as (geometry, source):
            plan_for = partial(
                plan_memory,
                geometry,
                config.cache,
                max_model_len=config.model.max_model_len,
                dtype=dtype,
                kv_memory_bytes=DEFAULT_CPU_CACHE_BYTES if device.type == "cpu" else None,
            )
            images = load_image_model(config, files, text_width=geometry.hidden_size, dtype=dtype, device=device)
            denoiser = images.denoiser if images is not None else None
            beside_bytes = adapters_bytes(config, dtype) + (denoiser.num_bytes if denoiser is not None else 0)
            panels = _panels(config, files, device)
            stored = size_of(files).weights
            fp8 = _fp8(config, stored, device, dtype)
            if fp8 != "dequantise":
                weights_bytes = fp8_bytes(geometry, dtype, grouped=stored.has_fp8_blocks)
            elif panels is None:
                weights_bytes = num_parameters(geometry) * dtype.itemsize
            else:
                weights_bytes = stored.held_in_panels(dtype)
            # What cannot fit is refused before anything large is allocated.
            plan = plan_for(room, weights_bytes=weights_bytes + beside_bytes)
            self.limits = replace(
                _limits(config, plan, geometry.vocab_size, device),
                image=images.limits if images is not None else None,
                embeds_width=geometry.hidden_size if config.limits.allow_prompt_embeds else 0,
                max_embedding_bytes=config.scheduler.max_embedding_mb << 20,
            )
            weights = load_weights(files, geometry, source, dtype=dtype, device=device, panels=panels, fp8=fp8)
        model = DenseModel(geometry, weights, ops_for(device.type), plan.max_model_len)
        table = RowTable(self.limits.max_num_seqs, plan.max_model_len, config.cache.block_size, device)
        if device.type == "cuda":
            if is_on("graphs"):
                room = replace(room, graphs=graphs_bytes(geometry, dtype, graph_shapes(self.limits.max_num_seqs)))
            room = measured(room, model, table, self.limits, denoiser=denoiser)
            plan = plan_for(room, weights_bytes=weights.num_bytes + beside_bytes)
            self.limits = replace(self.limits, num_blocks=plan.num_blocks, max_model_len=plan.max_model_len)
        ledger = room.ledger(weights.num_bytes + beside_bytes, plan.kv_bytes)
        kv_cache = _kv_cache(geometry, plan, config.cache.block_size, dtype, device)
        on_cpu = device.type == "cpu"
        stepper = Stepper(model, kv_cache, table, fast_step=_native_step(model, kv_cache) if on_cpu else None)
        self.runner = Runner(
            stepper,
            graphs=None if on_cpu or not is_on("graphs") else StepGraphs(stepper, self.limits.max_num_seqs),
            warm_up=None if on_cpu else WarmUp(stepper),
            denoiser=denoiser,
            max_adapters=config.scheduler.max_loras,
        )
        if not on_cpu:
            for line in ledger_table(ledger).splitlines():
                log.info("GPU memory: %s", line)
        self.memory = MemoryGauge(partial(memory_usage, device))
        self.info = ModelInfo(
            name=config.model.served_model_name or files.name,
            max_model_len=plan.max_model_len,
            logits_width=geometry.vocab_size,
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


def _panels(config: Config, files: ModelFiles, device: torch.device) -> PanelLayout | None:
    """Return the layout of quantised weights that stay so; None where they are unpacked, or there are none."""
    keeps = config.model.dtype == "auto" and device.type == "cpu" and files.kind == "gguf"
    return panel_layout() if keeps else None


def _fp8(config: Config, stored: Weights, device: torch.device, dtype: torch.dtype) -> Fp8Loading:
    """Return which linear weights are held as e4m3. Those of an FP8 checkpoint are dequantised where the device does
    not multiply them, or float32 is asked for."""
    is_wanted = config.backend.quantization == "fp8"
    can_multiply = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_WITH_FP8
    if is_wanted and (not can_multiply or dtype == torch.float32):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "A CPU"
        raise ConfigError(
            "--quantization fp8 does not go with --dtype float32."
            if can_multiply
            else f"{name} does not multiply FP8: --quantization fp8 needs an NVIDIA GPU of compute capability 8.9.",
            hint="Leave --dtype at auto." if can_multiply else "Leave --quantization out.",
        )
    if is_wanted:
        return "quantise"
    return "keep" if stored.fp8 and can_multiply and dtype != torch.float32 else "dequantise"


def _room(device: torch.device, cache: CacheOptions) -> DeviceMemory:
    if device.type == "cpu":
        return DeviceMemory(total=available_cpu_bytes())
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total=total, share=gpu_share(cache), others=total - free)


def _kv_cache(
    geometry: DenseConfig, plan: MemoryPlan, block_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    shape = cache_shape(geometry, plan.num_blocks, block_size)
    if device.type == "cpu":
        # numpy's zeros are untouched pages: memory is used as blocks are, not at the start.
        return torch.from_numpy(np.zeros(plan.kv_bytes, dtype=np.uint8)).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def _limits(config: Config, plan: MemoryPlan, vocab_size: int, device: torch.device) -> Limits:
    options = config.scheduler
    on_cpu = device.type == "cpu"
    max_num_seqs = options.max_num_seqs or (32 if on_cpu else 256)
    budget = options.max_num_batched_tokens or (2048 if on_cpu else 8192)
    check_step(budget, max_num_seqs)
    return Limits(
        num_blocks=plan.num_blocks,
        block_size=config.cache.block_size,
        max_model_len=plan.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_prefill_chunk=options.max_prefill_chunk or (256 if on_cpu else 2048),
        max_mixed_prefill=options.max_mixed_prefill or (256 if on_cpu else 384),
        max_step_seconds=(options.max_step_ms or (200 if on_cpu else 0)) / 1000,
        logits_width=vocab_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        max_preemptions=options.max_preemptions,
        force_preempt_every=options.force_preempt_every,
    )


def _native_step(model: DenseModel, kv_cache: Tensor) -> FastStep | None:
    return native_step(model.weights, model.config.heads, model.config.norm_eps, model.rotations, kv_cache)
