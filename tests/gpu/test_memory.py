"""A GPU's memory: weights come to it in one copy, the cache is what a measured step leaves, and the ledger is true."""

from __future__ import annotations

import gc
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from safetensors.torch import save_file

from tests.worker.driving import Driven, request, run
from weft.checkpoint.model_files import ModelFiles, dummy_files
from weft.errors import OutOfMemory
from weft.kernels.weights import DecoderWeights
from weft.machine.memory import MIB
from weft.model.loader import load_weights, open_model
from weft.options import CacheOptions, Config, ModelOptions, SchedulerOptions
from weft.types import FinishReason
from weft.worker.memory_profile import compute, largest_step
from weft.worker.worker import Worker

pytestmark = pytest.mark.gpu

HIDDEN, MIDDLE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2048, 5632, 6, 16, 4, 128, 32000
CUDA = torch.device("cuda")
SHARE = 0.10


def config_json() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": MIDDLE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def tensors(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """0.4 billion parameters, by their names."""

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, device="cuda") * 0.02).to(dtype).cpu()

    yield "model.embed_tokens.weight", matrix(VOCABULARY, HIDDEN)
    yield "lm_head.weight", matrix(VOCABULARY, HIDDEN)
    yield "model.norm.weight", torch.rand(HIDDEN).to(dtype)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", torch.rand(HIDDEN).to(dtype)
        yield f"{layer}.post_attention_layernorm.weight", torch.rand(HIDDEN).to(dtype)
        yield f"{layer}.self_attn.q_proj.weight", matrix(HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.k_proj.weight", matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.v_proj.weight", matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", matrix(HIDDEN, HEADS * HEAD_DIM)
        yield f"{layer}.mlp.gate_proj.weight", matrix(MIDDLE, HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", matrix(MIDDLE, HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", matrix(HIDDEN, MIDDLE)


@pytest.fixture(autouse=True)
def clean_gpu() -> Iterator[None]:
    _clean()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    _clean()


def _clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@pytest.fixture(scope="module")
def shape_only(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(config_json()))
    return dummy_files(folder)


def checkpoint(folder: Path, dtype: torch.dtype) -> ModelFiles:
    (folder / "config.json").write_text(json.dumps(config_json()))
    file = folder / "model.safetensors"
    save_file(dict(tensors(dtype)), file, metadata={"format": "pt"})
    return ModelFiles(name="random", kind="huggingface", path=folder, weight_files=[file])


def read(files: ModelFiles, device: torch.device, seen: list[int] | None = None) -> DecoderWeights:
    with open_model(files) as (config, source):
        return load_weights(
            files, config, source, dtype=torch.bfloat16, device=device,
            progress=lambda done, total: seen.append(anonymous_bytes()) if seen is not None else None,
        )  # fmt: skip


def anonymous_bytes() -> int:
    """Host memory of this process that is no file's."""
    (kib,) = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) * 1024


# Loading.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["as it is", "to another type"])
def test_weights_come_to_the_device_in_one_copy(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    files = checkpoint(tmp_path, dtype)
    _clean()
    before, host_before = torch.cuda.memory_allocated(), anonymous_bytes()
    host: list[int] = []
    weights = read(files, CUDA, host)
    peak = torch.cuda.max_memory_allocated() - before
    largest = VOCABULARY * HIDDEN * dtype.itemsize
    held = max(host) - host_before
    print(f"weights {weights.num_bytes / MIB:.0f} MiB, peak {peak / MIB:.0f} MiB, on the host {held / MIB:.0f} MiB")
    assert weights.num_bytes > 700 * MIB
    assert peak <= weights.num_bytes + largest + 16 * MIB
    assert held < largest + 64 * MIB
    expected = read(files, torch.device("cpu"))
    assert torch.equal(weights.embedding.cpu(), expected.embedding) and torch.equal(weights.head.cpu(), expected.head)
    for ours, theirs in zip(weights.layers, expected.layers, strict=True):
        for part, other in zip(ours, theirs, strict=True):
            assert (part is None) == (other is None)
            assert part is None or torch.equal(part.cpu(), other)


# Sizing.


def worker(files: ModelFiles, *, max_num_batched_tokens: int = 0, **cache: object) -> Worker:
    return Worker(
        Config(
            model=ModelOptions(device="cuda"),
            cache=CacheOptions(**({"gpu_memory_utilization": SHARE} | cache)),
            scheduler=SchedulerOptions(max_num_seqs=64, max_num_batched_tokens=max_num_batched_tokens),
        ),
        files,
    )


def test_all_of_it_stays_within_the_share(shape_only: ModelFiles, caplog: pytest.LogCaptureFixture) -> None:
    free_before, total = torch.cuda.mem_get_info()
    with caplog.at_level(logging.INFO, "weft"):
        made = worker(shape_only)
    ledger = made.info.memory
    table = "\n".join(record.getMessage() for record in caplog.records if "GPU memory:" in record.getMessage())
    print(table)
    assert ledger.total == total and ledger.spare > 0
    assert ledger.activations > 64 * MIB

    # The largest step again, now beside the cache: the ledger said what it takes.
    stepper = made.runner.stepper
    torch.cuda.reset_peak_memory_stats()
    compute(largest_step(made.limits), stepper.model, stepper.table, stepper.model.weights.dtype)
    held = torch.cuda.max_memory_reserved()
    assert held <= ledger.weights + ledger.activations + ledger.kv + 64 * MIB
    torch.cuda.empty_cache()

    # Every graph: the estimate covers them, and is no fantasy.
    before = torch.cuda.mem_get_info()[0]
    while made.runner.prepare():
        pass
    torch.cuda.empty_cache()
    graphs = before - torch.cuda.mem_get_info()[0]
    print(f"graphs: {ledger.graphs / MIB:.0f} MiB kept, {graphs / MIB:.0f} MiB taken")
    assert 0 < graphs <= ledger.graphs

    compute(largest_step(made.limits), stepper.model, stepper.table, stepper.model.weights.dtype)
    assert free_before - torch.cuda.mem_get_info()[0] <= SHARE * total
    wasted = SHARE * total - ledger.weights - ledger.activations - ledger.graphs - ledger.kv
    assert wasted < 1024 * MIB, "the cache is smaller than it could be"


def test_a_cache_that_is_asked_for_is_what_it_gets(shape_only: ModelFiles) -> None:
    made = worker(shape_only, kv_cache_memory_mb=512)
    assert 500 * MIB < made.info.memory.kv <= 512 * MIB
    assert made.runner.stepper.kv_cache.nbytes == made.info.memory.kv


def test_what_cannot_fit_is_refused_before_anything_is_loaded(shape_only: ModelFiles) -> None:
    half = torch.cuda.mem_get_info()[1] // 2 // MIB
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with pytest.raises(OutOfMemory, match="MiB are free") as caught:
        worker(shape_only, kv_cache_memory_mb=half)
    assert "--gpu-memory-utilization" in caught.value.hint
    assert torch.cuda.max_memory_allocated() < before + MIB


def test_a_step_that_does_not_fit_is_refused_with_the_flags_that_make_it_smaller(tmp_path: Path) -> None:
    # A checkpoint, not random weights of a shape: those take more memory while they are made.
    files = checkpoint(tmp_path, torch.bfloat16)
    total = torch.cuda.mem_get_info()[1]
    weights = read(files, CUDA).num_bytes
    _clean()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + weights + 192 * MIB) / total)
    with pytest.raises(OutOfMemory, match="does not fit beside the weights") as caught:
        worker(files, max_num_batched_tokens=16384)
    assert "--max-num-batched-tokens" in caught.value.hint


# Steps.


def test_a_step_too_large_for_the_memory_is_made_smaller(shape_only: ModelFiles) -> None:
    """A real shortage: prompts whose activations do not fit together go through in smaller steps."""
    made = worker(shape_only, kv_cache_memory_mb=2048)
    made.runner.graphs = None
    driven = Driven(made.runner, made.limits)
    work = [request(f"r{i}", [(7 * i + j) % 1000 for j in range(1500)], 8) for i in range(5)]
    assert run(driven, work, overlap=True).stats.preemptions == 0
    _clean()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 160 * MIB) / total)
    outcome = run(driven, work, overlap=True)
    assert outcome.stats.preemptions > 0, "there was memory enough: the test took too little of it"
    assert {output.finish for output in outcome.outputs.values()} == {FinishReason.LENGTH}
    assert {len(output.token_ids) for output in outcome.outputs.values()} == {8}
