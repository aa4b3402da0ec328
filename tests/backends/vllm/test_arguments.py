"""What vLLM is started with, and what is refused before it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.backends.vllm.arguments import ASCEND, CPU, CUDA_ASYNC, CUDA_SYNC, VllmKind, arguments_of, refuse
from weft.checkpoint.model_files import ModelFiles
from weft.config import load
from weft.errors import ConfigError, ModelError

FILES = ModelFiles(name="tiny", kind="huggingface", path=Path("/models/tiny"), weight_files=[])
GGUF = ModelFiles(name="smollm2", kind="gguf", path=Path("/models/smollm2.gguf"), weight_files=[])


def arguments(kind: VllmKind = CUDA_ASYNC, **flags: Any) -> dict[str, Any]:
    return arguments_of(load(flags, env={}), FILES, kind)


def test_defaults_are_those_of_the_native_engine() -> None:
    on_gpu = arguments()
    assert on_gpu["model"] == "/models/tiny" and on_gpu["served_model_name"] == "tiny"
    assert on_gpu["gpu_memory_utilization"] == 0.75
    assert on_gpu["dtype"] == "bfloat16"
    assert on_gpu["max_num_seqs"] == 256 and on_gpu["max_num_batched_tokens"] == 8192
    assert on_gpu["enable_prefix_caching"] is True
    assert on_gpu["max_model_len"] == -1, "as long as the memory holds"
    assert on_gpu["trust_remote_code"] is False
    assert on_gpu["load_format"] == "safetensors", "never a file that may hold code"
    assert {"block_size", "kv_cache_memory_bytes", "num_gpu_blocks_override", "enable_lora"}.isdisjoint(on_gpu)

    on_cpu = arguments(CPU)
    assert on_cpu["dtype"] == "float32"
    assert on_cpu["max_num_seqs"] == 32 and on_cpu["max_num_batched_tokens"] == 2048
    assert on_cpu["kv_cache_memory_bytes"] == 512 * 2**20
    assert "gpu_memory_utilization" not in on_cpu, "there it would be a share of the machine's memory"


def test_both_of_vllms_engines_get_the_same() -> None:
    assert arguments(CUDA_SYNC) == arguments(CUDA_ASYNC)


def test_every_setting_is_passed_on() -> None:
    asked = arguments(
        served_model_name="named",
        dtype="float16",
        max_model_len=4096,
        gpu_memory_utilization=0.6,
        enable_prefix_caching=False,
        quantization="awq",
        tensor_parallel_size=2,
        trust_remote_code=True,
        max_num_seqs=7,
        max_num_batched_tokens=512,
        max_prefill_chunk=128,
        block_size=32,
        num_blocks=100,
        kv_cache_memory_mb=64,
        kv_cache_dtype="fp8",
    )
    for name, value in {
        "served_model_name": "named",
        "dtype": "float16",
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.6,
        "enable_prefix_caching": False,
        "quantization": "awq",
        "tensor_parallel_size": 2,
        "trust_remote_code": True,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 512,
        "long_prefill_token_threshold": 128,
        "block_size": 32,
        "num_gpu_blocks_override": 100,
        "kv_cache_memory_bytes": 64 * 2**20,
        "kv_cache_dtype": "fp8",
    }.items():
        assert asked[name] == value, name


def test_a_share_above_nine_tenths_is_lowered_unless_it_is_insisted_on() -> None:
    assert arguments(gpu_memory_utilization=0.95)["gpu_memory_utilization"] == 0.85
    assert arguments(gpu_memory_utilization=0.95, insist_gpu_memory=True)["gpu_memory_utilization"] == 0.95


def test_quantised_weights_choose_their_own_type() -> None:
    assert arguments(quantization="gptq")["dtype"] == "auto"


def test_dummy_weights_need_no_tokenizer() -> None:
    dummy = arguments(load_format="dummy")
    assert dummy["load_format"] == "dummy" and dummy["skip_tokenizer_init"] is True


def test_room_for_adapters_only_where_there_are_any() -> None:
    for flags in ({"adapter": ["a=/a"]}, {"enable_lora": True}):
        assert arguments(**flags)["enable_lora"] is True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", 4),
        ("max_mixed_prefill", 100),
        ("max_step_ms", 100),
        ("speculative", "ngram"),
        ("speculative_model", "/models/small"),
        ("max_preemptions", 1),
        ("force_preempt_every", 2),
        ("max_num_images", 3),
        ("max_embedding_mb", 5),
        ("image_model", "/models/painter"),
        ("device", "cpu"),
    ],
)
def test_what_vllm_cannot_honour_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        refuse(load({name: value}, env={}), FILES, CUDA_ASYNC)


def test_a_device_that_is_the_engines_own_is_not_refused() -> None:
    refuse(load({"device": "cpu"}, env={}), FILES, CPU)
    refuse(load({"image_model": "none"}, env={}), FILES, ASCEND)


def test_a_gguf_file_is_refused_with_what_to_do() -> None:
    with pytest.raises(ModelError, match="native"):
        refuse(load({}, env={}), GGUF, CUDA_ASYNC)
