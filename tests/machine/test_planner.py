"""Tests the plan of a load on several machines, and that the engine then takes as much."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.tiny_adapters import EVERY_PART, lora_tensors, save_adapter
from weft.checkpoint.adapter_files import MAX_RANK
from weft.checkpoint.model_files import ModelFiles, dummy_files, model_at
from weft.errors import ConfigError
from weft.machine import planner
from weft.machine.devices import Device
from weft.machine.hardware import Cpu, Machine, Memory
from weft.machine.memory import GIB, MIB, graphs_bytes
from weft.machine.model_size import size_of
from weft.machine.planner import MEMORY_PROFILES, plan_lines, plan_load
from weft.model.loader import open_model
from weft.model.lora import read_adapter
from weft.options import Config, ModelOptions
from weft.worker.graphs import graph_shapes
from weft.worker.worker import Worker

CPU = Cpu(cores=8, usable_cores=8, features=("avx2",))
ROOMY = Machine(cpu=CPU, memory=Memory(total=64 * GIB, free=60 * GIB))
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072,
}  # fmt: skip
PARAMETERS_8B = 8_030_261_248


def gpus(total_gib: float, free_gib: float | None = None, count: int = 1) -> Machine:
    free = total_gib if free_gib is None else free_gib
    sizes = {"total": int(total_gib * GIB), "free": int(free * GIB)}
    devices = tuple(Device(kind="cuda", index=i, name="NVIDIA Something", **sizes) for i in range(count))
    return replace(ROOMY, devices=devices)


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = tmp_path_factory.mktemp("llama-8b")
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return dummy_files(folder)


def config(**settings: Any) -> Config:
    """Make a configuration by setting names, whatever the section, without an image model."""
    made = Config(model=ModelOptions(image_model="none"))
    for section in ("model", "backend", "cache", "scheduler"):
        options = getattr(made, section)
        given = {name: settings.pop(name) for name in list(settings) if name in options.__struct_fields__}
        made = replace(made, **{section: replace(options, **given)})
    assert not settings
    return made


# The numbers.


def test_weights_are_held_as_the_place_has_it(llama_8b: ModelFiles) -> None:
    on_cpu, on_gpu = plan_load(config(), llama_8b, ROOMY), plan_load(config(), llama_8b, gpus(80))
    assert on_cpu.weights == pytest.approx(4 * PARAMETERS_8B, rel=0.001)
    assert on_gpu.weights == pytest.approx(2 * PARAMETERS_8B, rel=0.001)
    assert (on_cpu.place, on_cpu.dtype, on_gpu.place, on_gpu.dtype) == ("cpu", "float32", "cuda", "bfloat16")
    assert plan_load(config(dtype="float16"), llama_8b, ROOMY).weights == on_gpu.weights


def test_the_cache_is_by_key_value_heads(llama_8b: ModelFiles) -> None:
    """The cache is a quarter of what 32 heads would take: 128 KiB a token, so 16 GiB for a whole context."""
    plan = plan_load(config(max_model_len=131072), llama_8b, gpus(80))
    assert plan.kv_per_token == 32 * 2 * 8 * 128 * 2 == 128 * 1024
    assert plan.problem is None and plan.max_model_len == 131072
    assert plan.kv == plan.num_blocks * 16 * plan.kv_per_token


def test_the_parts_of_the_device_add_up(llama_8b: ModelFiles) -> None:
    ledger = plan_load(config(), llama_8b, gpus(80, 78)).ledger
    assert ledger.total == 80 * GIB and ledger.others == 2 * GIB + MEMORY_PROFILES["native"].framework_bytes
    # Three quarters are Weft's: what is left of them is less than a block.
    rest = ledger.spare - 18 * GIB
    assert 0 <= rest < 2 * MIB + 2, rest


def test_what_fits_fits_and_no_more(llama_8b: ModelFiles) -> None:
    """The largest context fits when it is asked for; a shorter one saves only its tables."""
    machine = gpus(28)
    plan = plan_load(config(), llama_8b, machine)
    assert 2048 < plan.largest_context < 131072 and plan.max_model_len == plan.largest_context
    assert plan.largest_batch == 1
    at_most = plan_load(config(max_model_len=plan.largest_context), llama_8b, machine)
    assert at_most.problem is None and at_most.warning == ""
    beyond = plan_load(config(max_model_len=plan.largest_context * 6 // 5), llama_8b, machine)
    assert beyond.problem is not None or beyond.warning
    shorter = plan_load(config(max_model_len=plan.largest_context // 4), llama_8b, machine)
    assert shorter.largest_batch >= 4


def test_several_gpus_hold_a_part_each(llama_8b: ModelFiles) -> None:
    one = plan_load(config(engine="cuda-vllm"), llama_8b, gpus(80), engine="cuda-vllm")
    four = plan_load(config(tensor_parallel_size=4), llama_8b, gpus(80, count=4), engine="cuda-vllm")
    assert four.weights == one.weights // 4 and four.kv_per_token == one.kv_per_token // 4


def test_ranks_of_the_native_engine_hold_a_part_each(llama_8b: ModelFiles) -> None:
    """On a CPU they share its memory as well. Of eight key-value heads, sixteen ranks hold one each."""
    settings = {"max_model_len": 4096}
    for machine in (gpus(80, count=16), ROOMY):
        one = plan_load(config(**settings), llama_8b, machine)
        four, sixteen = (plan_load(config(tensor_parallel_size=n, **settings), llama_8b, machine) for n in (4, 16))
        assert four.weights == pytest.approx(one.weights / 4, rel=0.001)
        assert (four.kv_per_token, sixteen.kv_per_token) == (one.kv_per_token // 4, one.kv_per_token // 8)
        assert four.device.endswith(", each of 4")
    assert four.memory.total == one.memory.total // 4
    with pytest.raises(ConfigError, match="32 heads, 8 key-value heads") as told:
        plan_load(config(tensor_parallel_size=3), llama_8b, ROOMY)
    assert "can be 1, 2, 4, 8, 16, 32" in told.value.hint


def test_a_cache_of_fp8_holds_twice_as_many_tokens(llama_8b: ModelFiles) -> None:
    plain, rounded = (plan_load(config(kv_cache_dtype=kind), llama_8b, gpus(80)) for kind in ("auto", "fp8"))
    assert plain.kv_per_token == 32 * 2 * 8 * 128 * 2 and rounded.kv_per_token == 32 * 2 * 8 * 130
    assert rounded.num_blocks == pytest.approx(plain.num_blocks * 256 / 130, rel=1e-3)
    assert rounded.weights == plain.weights


def test_what_is_quantised_stays_so_where_the_engine_keeps_it(tiny_gguf: Callable[[str, str], Path]) -> None:
    files = model_at(tiny_gguf("smollm2", "Q8_0"))
    packed = size_of(files).weights
    ours, theirs = plan_load(config(), files, ROOMY), plan_load(config(), files, ROOMY, engine="cpu-vllm")
    unpacked = plan_load(config(dtype="float32"), files, ROOMY)
    assert ours.weights == packed.held_in_panels(torch.float32) < unpacked.weights
    assert unpacked.weights == 4 * (packed.packed + packed.floats)
    assert theirs.weights == packed.packed_bytes + 4 * packed.floats


def test_blocks_of_a_gguf_file_stay_quantised_on_a_gpu(tiny_gguf: Callable[[str, str], Path]) -> None:
    files = model_at(tiny_gguf("smollm2", "Q8_0"))
    stored = size_of(files).weights
    kept, unpacked = (plan_load(config(dtype=kind), files, gpus(80)) for kind in ("auto", "float32"))
    assert kept.weights == stored.block_bytes < unpacked.weights // 2
    assert kept.packed_bytes == stored.packed_bytes and unpacked.unpacked_bytes == stored.packed_bytes


def test_int8_takes_half_of_bfloat16_and_a_third_of_float32(llama_8b: ModelFiles) -> None:
    plain, rounded = (plan_load(config(quantization=kind), llama_8b, gpus(80)) for kind in ("", "int8"))
    embedding = 128256 * 4096
    assert rounded.weights - 2 * embedding == pytest.approx((plain.weights - 2 * embedding) / 2, rel=1e-3)
    plain, rounded = (plan_load(config(quantization=kind), llama_8b, ROOMY) for kind in ("", "int8"))
    assert rounded.weights - 4 * embedding == pytest.approx((plain.weights - 4 * embedding) * 1.125 / 4, rel=1e-3)


def test_what_is_quantised_while_it_is_loaded_is_not_refused_as_it_is_in_the_file(llama_8b: ModelFiles) -> None:
    machine = gpus(16)
    assert plan_load(config(max_model_len=4096), llama_8b, machine, engine="cuda-vllm").problem is not None
    quantised = config(max_model_len=4096, quantization="bitsandbytes")
    assert plan_load(quantised, llama_8b, machine, engine="cuda-vllm").problem is None


def test_a_model_that_draws_is_counted(
    llama_8b: ModelFiles, tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    beside = config(image_model=str(tiny_directory("llama2")))
    drawing = size_of(model_at(tiny_directory("llama2"))).weights.floats
    without = plan_load(config(), llama_8b, ROOMY).weights
    assert plan_load(beside, llama_8b, ROOMY).weights == without + 4 * drawing
    assert plan_load(config(image_model=str(tmp_path)), llama_8b, ROOMY).weights == without


def test_adapters_are_counted_as_no_less_than_they_hold(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    model = model_at(tiny_directory("smollm2"))
    without = plan_load(config(), model, ROOMY).weights
    counted = []
    for parts in (("q_proj",), ("q_proj", "v_proj"), EVERY_PART):
        folder = save_adapter("smollm2", tmp_path / str(len(parts)), parts=parts)
        with open_model(model) as (geometry, _):
            held = read_adapter(folder, geometry, torch.float32).num_bytes
        counted.append(plan_load(config(adapter=(str(folder),)), model, ROOMY).weights - without)
        # As much again is laid out for native code.
        assert counted[-1] == 2 * held
    given = [f"{name}={tmp_path / name}" for name in ("1", "2", "7", "gone")]
    assert plan_load(config(adapter=given), model, ROOMY).weights == without + sum(counted)
    assert plan_load(config(adapter=given, max_loras=1), model, ROOMY).weights == without + counted[-1]
    assert Worker(config(adapter=given, device="cpu"), model).info.memory.weights == without + sum(counted)


def test_a_gpu_has_slots_for_adapters_of_the_largest_rank(
    tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    model = model_at(tiny_directory("smollm2"))
    given = [f"{rank}={save_adapter('smollm2', tmp_path / str(rank), rank=rank)}" for rank in (4, 20)]

    def weights(**settings: Any) -> int:
        return plan_load(config(dtype="float32", **settings), model, gpus(16)).weights

    slot = {rank: sum(4 * tensor.numel() for tensor in lora_tensors("smollm2", 1, rank=rank).values())
            for rank in (16, 32)}  # fmt: skip
    assert weights(enable_lora=True, max_loras=3) == weights() + 3 * slot[16]
    assert weights(adapter=given[:1]) == weights() + 8 * slot[16]
    assert weights(adapter=given, max_loras=2) == weights() + 2 * slot[32]


def test_the_room_that_vllm_makes_for_adapters_is_estimated(tiny_directory: Callable[[str], Path]) -> None:
    model, framework = model_at(tiny_directory("smollm2")), MEMORY_PROFILES["cuda-vllm"].framework_bytes

    def libraries(**settings: Any) -> int:
        return plan_load(config(dtype="float32", **settings), model, gpus(16), engine="cuda-vllm").memory.libraries

    largest = sum(4 * tensor.numel() for tensor in lora_tensors("smollm2", 1, rank=MAX_RANK).values())
    assert libraries(max_loras=3) == framework
    assert libraries(max_loras=3, enable_lora=True) == framework + 3 * largest


# What does not fit.


def test_weights_that_are_too_much_are_refused_for_good(llama_8b: ModelFiles) -> None:
    plan = plan_load(config(), llama_8b, gpus(12))
    assert plan.problem is not None and plan.is_final
    assert "15.0 GiB as bfloat16; 12.0 GiB are free" in plan.problem.message


def test_weights_beyond_the_share_are_refused_with_the_share_that_holds_them(llama_8b: ModelFiles) -> None:
    plan = plan_load(config(gpu_memory_utilization=0.15), llama_8b, gpus(80))
    assert plan.problem is not None and not plan.is_final
    (share,) = re.findall(r"--gpu-memory-utilization (\d\.\d\d)", plan.problem.hint)
    assert plan_load(config(gpu_memory_utilization=float(share)), llama_8b, gpus(80)).problem is None


def test_a_cache_that_is_too_large_is_refused_with_the_size_that_fits(llama_8b: ModelFiles) -> None:
    plan = plan_load(config(kv_cache_memory_mb=100_000), llama_8b, ROOMY)
    assert plan.problem is not None
    (size,) = re.findall(r"--kv-cache-memory-mb (\d+)", plan.problem.hint)
    assert plan_load(config(kv_cache_memory_mb=int(size)), llama_8b, ROOMY).problem is None
    assert plan_load(config(kv_cache_memory_mb=int(size) + 1), llama_8b, ROOMY).problem is not None


def test_estimates_alone_warn_and_do_not_refuse(llama_8b: ModelFiles) -> None:
    """The weights and one request fit; only the estimates of steps and libraries exceed the memory."""
    plan = plan_load(config(max_model_len=2048, gpu_memory_utilization=0.9), llama_8b, gpus(17.5))
    assert plan.problem is None and "estimated" in plan.warning and plan.largest_context == 0


def test_a_share_that_is_not_free_is_refused_where_the_engine_wants_all_of_it(llama_8b: ModelFiles) -> None:
    crowded = gpus(80, 50)
    assert plan_load(config(), llama_8b, crowded).problem is None
    plan = plan_load(config(), llama_8b, crowded, engine="cuda-vllm-async")
    assert plan.problem is not None and "--gpu-memory-utilization 0.62" in plan.problem.hint
    assert plan.free_share == 0.62
    lower = config(gpu_memory_utilization=0.62)
    assert plan_load(lower, llama_8b, crowded, engine="cuda-vllm-async").problem is None


def test_a_context_beyond_the_models_is_no_question_of_memory(llama_8b: ModelFiles) -> None:
    plan = plan_load(config(max_model_len=200_000), llama_8b, gpus(80))
    assert plan.problem is not None and plan.is_final and "131072" in plan.problem.hint


def test_what_is_free_may_be_taken_up_to_what_is_safe(llama_8b: ModelFiles) -> None:
    assert plan_load(config(), llama_8b, gpus(80)).free_share == 0.9
    assert plan_load(config(insist_gpu_memory=True), llama_8b, gpus(80)).free_share == 1.0


def test_what_is_not_known_is_said_and_not_refused(llama_8b: ModelFiles, tmp_path: Path) -> None:
    mystery = plan_load(config(), llama_8b, gpus(0))
    assert mystery.problem is None and "not known" in mystery.warning
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"kv_lora_rank": 512}))
    compressed = plan_load(config(), dummy_files(tmp_path), gpus(80))
    assert compressed.problem is None and "cache" in compressed.warning and compressed.kv_per_token == 0


def test_a_device_that_is_not_there_is_refused(llama_8b: ModelFiles) -> None:
    for engine, wanted in (("native", "cuda"), ("cuda-vllm", "auto"), ("ascend-vllm", "auto")):
        with pytest.raises(ConfigError, match=r"There is no (cuda|ascend) device"):
            plan_load(config(device=wanted), llama_8b, ROOMY, engine=engine)


# For a reader.


def test_a_table_says_what_and_how_it_is_known(llama_8b: ModelFiles) -> None:
    lines = plan_lines(plan_load(config(), llama_8b, gpus(80, 79)))
    text = "\n".join(lines)
    assert "by native on NVIDIA Something" in lines[0]
    assert re.search(r"weights +14\.9\d +18\.7%", text) and re.search(r"total +80\.00 +100\.0%", text)
    assert "128.0 KiB a token" in text and "--gpu-memory-utilization is 0.75" in text
    assert "longest context of one request, with the largest cache: 131072 tokens" in text and lines[-1].startswith(
        "fits"
    )
    assert "does not fit: The weights" in "\n".join(plan_lines(plan_load(config(), llama_8b, gpus(8))))


# The same as the engine.


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip compilation: no step is computed here."""
    monkeypatch.setattr("weft.worker.worker._native_step", lambda model, kv_cache: None)


def test_the_defaults_are_the_engines_own(tiny_model: Path) -> None:
    files, settings = model_at(tiny_model), config(device="cpu")
    worker, plan = Worker(settings, files), plan_load(settings, files, ROOMY)
    assert (plan.max_num_seqs, plan.max_num_batched_tokens) == (
        worker.limits.max_num_seqs,
        worker.limits.max_num_batched_tokens,
    )
    assert plan.dtype == worker.info.dtype
    assert (plan.kv, plan.num_blocks) == (worker.info.memory.kv, worker.info.num_blocks)
    assert plan.max_model_len == worker.info.max_model_len


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_memory_mb": 10, "block_size": 32},
        {"max_model_len": 100, "dtype": "bfloat16", "num_blocks": 77},
        {"max_num_seqs": 3, "max_num_batched_tokens": 64},
    ],
    ids=str,
)
def test_what_is_asked_for_is_what_the_engine_takes(settings: dict[str, Any], tiny_model: Path) -> None:
    asked, files = config(device="cpu", **settings), model_at(tiny_model)
    info, plan = Worker(asked, files).info, plan_load(asked, files, ROOMY)
    assert (plan.weights, plan.kv) == (info.memory.weights, info.memory.kv)
    assert (plan.num_blocks, plan.max_model_len, plan.dtype) == (info.num_blocks, info.max_model_len, info.dtype)


def test_a_draft_model_is_planned_for(tiny_model: Path) -> None:
    files = model_at(tiny_model)
    asked, both = config(device="cpu", speculative_model=str(tiny_model)), replace(files, draft=files)
    info, plan = Worker(asked, both).info, plan_load(asked, both, ROOMY)
    alone = plan_load(config(device="cpu"), files, ROOMY)
    assert (plan.weights, plan.kv, plan.num_blocks) == (info.memory.weights, info.memory.kv, info.num_blocks)
    assert plan.weights == 2 * alone.weights and plan.kv_per_token == 2 * alone.kv_per_token


def test_the_default_model_takes_what_the_plan_says(smollm2_files: ModelFiles) -> None:
    settings = Config(model=ModelOptions(device="cpu"))
    info, plan = Worker(settings, smollm2_files).info, plan_load(settings, smollm2_files, ROOMY)
    assert plan.weights == pytest.approx(info.memory.weights, rel=0.03)
    assert plan.kv == info.memory.kv
    assert (plan.num_blocks, plan.max_model_len, plan.dtype) == (info.num_blocks, info.max_model_len, info.dtype)


@pytest.mark.parametrize("seqs", [1, 8, 32, 64, 100, 256, 512])
def test_the_estimate_of_graphs_covers_those_that_are_captured(llama_8b: ModelFiles, seqs: int) -> None:
    geometry = size_of(llama_8b).geometry
    assert geometry is not None
    captured = graphs_bytes(geometry, torch.bfloat16, graph_shapes(seqs))
    estimated = plan_load(config(max_num_seqs=seqs), llama_8b, gpus(80)).memory.graphs
    assert captured <= estimated < 1.6 * captured


def test_the_packaged_image_model_is_where_the_engine_looks_for_it() -> None:
    from weft.worker.diffusion.load import PACKAGED

    assert planner.PACKAGED_IMAGE_MODEL == PACKAGED
