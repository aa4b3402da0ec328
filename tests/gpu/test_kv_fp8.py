"""A KV cache of FP8 on the GPU: answers are near those of a cache in floats, and the same however they were made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a CUDA device with FP8", allow_module_level=True)

from msgspec.structs import replace

from tests import tiny_models
from tests.gpu.test_engine import PROMPTS, SEEDED, forbid_waiting
from tests.gpu.test_memory import config_json
from tests.tiny_adapters import save_adapter
from tests.worker.driving import Driven, load, request, run, watched_logits
from tests.worker.subjects import AFTER_THE_FIRST
from tests.worker.test_cache_types import with_fp8_cache
from weft.checkpoint.model_files import dummy_files
from weft.errors import ConfigError
from weft.hub.resolve import resolve
from weft.options import CacheOptions, Config, ModelOptions, SchedulerOptions
from weft.types import Adapter, Request
from weft.worker.worker import Worker

pytestmark = pytest.mark.gpu

LONG = [(31 * i + 2) % tiny_models.VOCAB_SIZE for i in range(200)]


def worker(folder: Path, kv_cache_dtype: str, dtype: str = "float16", draft: Path | None = None) -> Worker:
    """In float16, whose own rounding is small beside that of e4m3."""
    files = resolve(str(folder))
    model = ModelOptions(
        device="cuda", dtype=dtype, max_model_len=256, speculative_model="" if draft is None else str(draft)
    )
    config = Config(
        model=model,
        cache=CacheOptions(num_blocks=128, kv_cache_dtype=kv_cache_dtype),
        scheduler=SchedulerOptions(max_num_seqs=12),
    )
    return Worker(config, files if draft is None else replace(files, draft=resolve(str(draft))))


def on_gpu(folder: Path, kv_cache_dtype: str = "fp8", dtype: str = "float16", draft: Path | None = None) -> Driven:
    made = worker(folder, kv_cache_dtype, dtype, draft)
    return Driven(made.runner, made.limits)


def work(num_tokens: int = 32) -> list[Request]:
    greedy = [request(f"greedy{i}", prompt, num_tokens) for i, prompt in enumerate(PROMPTS)]
    return greedy + [request(f"seeded{i}", prompt, num_tokens, **SEEDED) for i, prompt in enumerate(PROMPTS)]


def first_logits(gpu: Driven, prompt: list[int], **limits: int) -> torch.Tensor:
    with watched_logits() as seen:
        run(gpu, [request("r", prompt, 1)], **limits)
    return seen[-1][0].float()


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.fixture(scope="module")
def gpu(tiny_directory: Callable[[str], Path]) -> Driven:
    return on_gpu(tiny_directory("qwen3"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", tiny_models.SPECS)
def test_logits_are_those_of_the_reference(name: str, dtype: str, tiny_directory: Callable[[str], Path]) -> None:
    """Up to what rounding does to them: models of random weights make much of a key that is rounded the other way."""
    floats = load(tiny_directory(name))
    reference, gpu = with_fp8_cache(floats), on_gpu(tiny_directory(name), "fp8", dtype)
    for prompt in (LONG, PROMPTS[1]):
        wanted = first_logits(reference, prompt)
        rounding = apart(wanted, first_logits(floats, prompt))
        assert rounding > 1e-4
        assert apart(first_logits(gpu, prompt).cpu(), wanted) < 3 * rounding


def test_decodes_give_what_a_prompt_gives(gpu: Driven) -> None:
    with watched_logits() as seen:
        tokens = run(gpu, [request("r", LONG, 8)]).tokens("r")
    for i, logits in enumerate(seen):
        assert apart(logits[0].float(), first_logits(gpu, LONG + tokens[:i])) < 2e-2


def test_a_prompt_gives_the_same_whether_it_is_cached_or_in_chunks(gpu: Driven) -> None:
    whole = first_logits(gpu, LONG)
    with watched_logits() as seen:
        got = run(gpu, [request("first", LONG, 1)], later=[(AFTER_THE_FIRST, request("again", LONG, 1))])
    assert got.outputs["again"].cached_tokens == 192
    assert apart(seen[-1][0].float(), whole) < 1e-2
    assert apart(first_logits(gpu, LONG, enable_prefix_caching=False), whole) < 1e-3
    for chunk in (7, 64):
        # A number that is rounded the other way is off by a sixteenth: it stays at a few of them.
        assert apart(first_logits(gpu, LONG, max_prefill_chunk=chunk), whole) < 2e-2


def test_graphs_give_what_eager_steps_give(tiny_directory: Callable[[str], Path]) -> None:
    gpu = on_gpu(tiny_directory("qwen3"), dtype="bfloat16")
    graphs = gpu.runner.graphs
    assert graphs is not None
    gpu.runner.graphs = None
    eager = run(gpu, work(), overlap=True).outputs
    gpu.runner.graphs = graphs
    while gpu.runner.prepare():
        pass
    assert run(gpu, work(), overlap=True).outputs == eager


def test_preempted_requests_go_on(gpu: Driven) -> None:
    got = run(gpu, work(), force_preempt_every=3, overlap=True)
    assert got.stats.preemptions > 6
    alone = {one.request_id: run(gpu, [one]).tokens(one.request_id) for one in work()}
    same = [got.tokens(name)[:4] == tokens[:4] for name, tokens in alone.items()]
    assert sum(same) >= len(same) - 1, "the first tokens are those of a run alone, but for a near tie"


def test_a_draft_model_has_such_a_cache_too(tiny_directory: Callable[[str], Path]) -> None:
    made = worker(tiny_directory("qwen3"), "fp8", draft=tiny_directory("qwen3"))
    draft_model = made.runner.draft_model
    assert draft_model is not None
    assert isinstance(made.runner.stepper.kv_cache, list) and isinstance(draft_model.stepper.kv_cache, list)
    stats = run(Driven(made.runner, made.limits), work(48), max_speculative_tokens=40).stats
    assert stats.draft_tokens > 50 and stats.accepted_tokens > 0.8 * stats.draft_tokens


def test_adapters_are_computed_over_it(gpu: Driven, tmp_path: Path) -> None:
    path = str(save_adapter("qwen3", tmp_path / "adapter", 1))
    adapted = replace(request("adapted", PROMPTS[1], 4), adapter=Adapter(name="style", number=1, path=path))
    beside = run(gpu, [adapted, *work(4)])
    alone = run(gpu, [adapted]).tokens("adapted")
    assert beside.tokens("adapted")[0] == alone[0]
    assert alone != run(gpu, [request("plain", PROMPTS[1], 4)]).tokens("plain")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_decode_loop_waits_for_nothing(tiny_directory: Callable[[str], Path]) -> None:
    gpu = on_gpu(tiny_directory("llama3"))
    while gpu.runner.prepare():
        pass
    run(gpu, [request("warm", PROMPTS[0], 4)])
    forbid_waiting(gpu)
    run(gpu, work(20), overlap=True)


def test_twice_as_many_tokens_fit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json()))
    files = dummy_files(tmp_path)
    blocks = {}
    for kind in ("auto", "fp8"):
        cache = CacheOptions(kv_cache_memory_mb=512, kv_cache_dtype=kind)
        made = Worker(Config(model=ModelOptions(device="cuda", image_model="none"), cache=cache), files)
        blocks[kind] = made.info.num_blocks
        kept = made.runner.stepper.kv_cache
        held = kept.nbytes if isinstance(kept, torch.Tensor) else sum(part.nbytes for one in kept for part in one)
        assert held == made.info.memory.kv <= 512 << 20
    # 128 numbers of a head have a scale of two bytes.
    assert blocks["fp8"] == pytest.approx(blocks["auto"] * 256 / 130, rel=0.01)


def test_float32_is_not_rounded(tiny_directory: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8 does not go with --dtype float32"):
        on_gpu(tiny_directory("qwen3"), dtype="float32")
