"""Prompt embeds of text on a GPU: a text's own embeddings give exactly its tokens, and no step waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from msgspec.structs import replace

from tests import tiny_models
from tests.gpu.test_engine import forbid_waiting, on_gpu, work
from tests.worker.driving import Driven, request, run
from tests.worker.test_mixed_prompts import MAX_TOKENS, PARTS, PROMPT, asked, mixed

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_directory("smollm2", tmp_path_factory.mktemp("rows") / "smollm2")


def taking(folder: Path, dtype: str) -> Driven:
    gpu = on_gpu(folder, dtype)
    while gpu.runner.prepare():
        pass
    return Driven(gpu.runner, replace(gpu.limits, embeds_width=96, max_embedding_bytes=1 << 20))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_texts_embeddings_are_the_text(folder: Path, dtype: str) -> None:
    gpu = taking(folder, dtype)
    for condition in ({}, {"overlap": True}, {"max_prefill_chunk": 7}, {"force_preempt_every": 3}):
        expected = run(gpu, [request("ids", PROMPT, MAX_TOKENS)], **condition).tokens("ids")
        for name, places in PARTS.items():
            one = asked(name, mixed(gpu, places, dtype))
            assert run(gpu, [one], **condition).tokens(name) == expected, f"{name} under {condition}"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_their_steps_wait_for_nothing(folder: Path) -> None:
    gpu = taking(folder, "bfloat16")
    rows = [asked(name, mixed(gpu, places, "bfloat16"), repetition_penalty=1.2) for name, places in PARTS.items()]
    run(gpu, [*rows, *work()])
    forbid_waiting(gpu)
    run(gpu, [*rows, *work()], overlap=True)
