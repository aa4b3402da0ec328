"""The whole engine on the GPU: the tokens of the CPU, whatever the batch, the graphs and the order of results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests import tiny_models
from tests.worker.driving import Driven, load, request, run, under_reference, watched_logits
from weft.hub.resolve import resolve
from weft.options import CacheOptions, Config, ModelOptions, SchedulerOptions
from weft.types import SamplingParams
from weft.worker.worker import Worker

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 9, 200, 31], list(range(3, 60)), [7] * 33, [250, 1, 17, 99, 4] * 9]
SEEDED = {"temperature": 0.8, "seed": 3, "top_k": 40, "top_p": 0.9}


def on_gpu(folder: Path, dtype: str = "float32", **cache: int) -> Driven:
    worker = Worker(
        Config(
            model=ModelOptions(device="cuda", dtype=dtype, max_model_len=256),
            cache=CacheOptions(num_blocks=128, **cache),
            scheduler=SchedulerOptions(max_num_seqs=12),
        ),
        resolve(str(folder)),
    )
    return Driven(worker.runner, worker.limits)


def forbid_waiting(gpu: Driven) -> None:
    """From now on a step's launch must not synchronise with the device: only reading its result may."""
    execute = gpu.runner.execute

    def watched(plan):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return execute(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    gpu.runner.execute = watched  # type: ignore[method-assign]


def work() -> list:
    greedy = [request(f"greedy{i}", prompt, 32) for i, prompt in enumerate(PROMPTS)]
    return greedy + [request(f"seeded{i}", prompt, 32, **SEEDED) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("name", tiny_models.SPECS)
def test_the_tokens_are_the_cpus(name: str, tmp_path: Path) -> None:
    folder = tiny_models.save_directory(name, tmp_path / name)
    expected = run(under_reference(load(folder)), work()).outputs
    gpu = on_gpu(folder)
    assert run(gpu, work()).outputs.keys() == expected.keys()
    for condition in ({}, {"overlap": True}, {"max_prefill_chunk": 7}, {"force_preempt_every": 3}):
        got = run(gpu, work(), **condition)
        for request_id, output in expected.items():
            assert got.tokens(request_id) == output.token_ids, f"{request_id} under {condition}"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_cached_prefix_gives_the_tokens_of_a_run_alone(overlap: bool, tmp_path: Path) -> None:
    gpu = on_gpu(tiny_models.save_directory("qwen3", tmp_path / "qwen3"))
    alone = {i: run(gpu, [request("alone", prompt, 32)]).tokens("alone") for i, prompt in enumerate(PROMPTS)}
    again = [(80, request(f"again{i}", prompt, 32)) for i, prompt in enumerate(PROMPTS)]
    got = run(gpu, work(), later=again, overlap=overlap, max_prefill_chunk=7)
    for i, prompt in enumerate(PROMPTS):
        assert got.tokens(f"again{i}") == alone[i]
        assert (
            got.outputs[f"again{i}"].cached_tokens == (len(prompt) - 1) // gpu.limits.block_size * gpu.limits.block_size
        )


@pytest.mark.parametrize("name", tiny_models.SPECS)
def test_logits_and_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.model import reference_models

    folder = tiny_models.save_directory(name, tmp_path / name)
    prompt = PROMPTS[1]
    gpu = on_gpu(folder)
    with watched_logits() as seen:
        tokens = run(gpu, [request("r", prompt, 32)]).tokens("r")
    reference = reference_models.from_directory(folder)
    expected = reference_models.logits(reference, prompt + tokens)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.cat(seen).cpu(), expected, atol=5e-4, rtol=0)
    assert tokens == expected.argmax(-1).tolist()


def test_graphs_give_what_eager_steps_give(tmp_path: Path) -> None:
    folder = tiny_models.save_directory("qwen3", tmp_path / "qwen3")
    gpu = on_gpu(folder, "bfloat16")
    graphs = gpu.runner.graphs
    assert graphs is not None
    gpu.runner.graphs = None
    eager = run(gpu, work(), overlap=True).outputs
    gpu.runner.graphs = graphs
    while gpu.runner.prepare():
        pass
    assert run(gpu, work(), overlap=True).outputs == eager


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_decode_loop_waits_for_nothing(tmp_path: Path) -> None:
    folder = tiny_models.save_directory("llama3", tmp_path / "llama3")
    gpu = on_gpu(folder)
    while gpu.runner.prepare():
        pass
    run(gpu, [request("warm", PROMPTS[0], 4)])
    forbid_waiting(gpu)
    run(gpu, [request(f"r{i}", prompt, 20) for i, prompt in enumerate(PROMPTS)], overlap=True)


def test_a_middle_sized_model_in_bfloat16(tmp_path: Path) -> None:
    """Random weights of a real geometry: the logits stay within bfloat16's reach of the reference in float32."""
    from msgspec.structs import replace

    from weft.kernels import REFERENCE, ops_for
    from weft.kernels.weights import DecoderWeights, LayerWeights
    from weft.model.dense import DenseConfig, DenseModel
    from weft.plan import Row, RowAdmission, StepPlan
    from weft.worker.forward_step import Stepper
    from weft.worker.rows import RowTable
    from weft.worker.runner import Runner

    torch.manual_seed(0)
    config = DenseConfig(
        family="qwen3", hidden_size=1024, num_layers=4, num_heads=16, num_kv_heads=4, head_dim=128,
        intermediate_size=2816, vocab_size=5000, max_position=1024, norm_eps=1e-6, rope_theta=1e6, qk_norm=True,
    )  # fmt: skip

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * 0.02).bfloat16()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, device="cuda", dtype=torch.bfloat16)

    heads = config.heads
    layers = [
        LayerWeights(
            attention_norm=ones(1024), qkv=matrix(heads.q_size + heads.kv_size, 1024), qkv_bias=None,
            q_norm=ones(128), k_norm=ones(128), output=matrix(1024, heads.q_size), output_bias=None,
            mlp_norm=ones(1024), gate_up=matrix(2 * 2816, 1024), down=matrix(1024, 2816),
        )
        for _ in range(4)
    ]  # fmt: skip
    weights = DecoderWeights(matrix(5000, 1024), layers, ones(1024), matrix(5000, 1024))
    wide = DecoderWeights(
        weights.embedding.float(),
        [LayerWeights(*(None if t is None else t.float() for t in layer)) for layer in layers],
        weights.norm.float(),
        weights.head.float(),
    )
    rows = [Row(0, 0, 300, list(range(1, 20)), True), Row(1, 0, 17, [20, 21], True), Row(2, 0, 1, [22], True)]
    params = SamplingParams(temperature=0, seed=0)
    prompts = [torch.randint(5000, (row.count,)).tolist() for row in rows]
    admit = [RowAdmission(i, prompt, len(prompt), params, []) for i, prompt in enumerate(prompts)]
    logits = []
    for model, dtype in ((DenseModel(config, weights, ops_for("cuda"), 512), torch.bfloat16),
                         (DenseModel(replace(config), wide, REFERENCE, 512), torch.float32)):  # fmt: skip
        table = RowTable(4, 512, 16, torch.device("cuda"))
        cache = torch.zeros(4, 40, 16, 2, 4, 128, device="cuda", dtype=dtype)
        with watched_logits() as seen:
            Runner(Stepper(model, cache, table)).execute(StepPlan(0, [], admit, rows))
        logits += [step.float() for step in seen]
    error = (logits[0] - logits[1]).norm() / logits[1].norm()
    assert error < 2e-2, error
