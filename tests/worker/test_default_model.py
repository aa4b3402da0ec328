"""The default model gives, token for token, what transformers gives for its exactly dequantised weights: alone, in
company, in pieces, cached, preempted or resumed. A step takes long, so several conditions share a run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.worker.driving import load, request, run
from tests.worker.subjects import Subject, alone, cached_chunks, late_strangers, tiny_pool
from tests.worker.test_prompt_outputs import assert_scores, embedding, expected_vector, vector
from weft.checkpoint.model_files import ModelFiles
from weft.text.tokenizer import Tokenizer
from weft.types import Pooling, TextAssets

TEXTS = [
    "<|im_start|>user\nWhat is a loom, and why does it have a warp and a weft?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\n请用中文介绍一下长城。<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def smollm2(smollm2_files: ModelFiles, smollm2_assets: TextAssets) -> Subject:
    tokenizer = Tokenizer.from_assets(smollm2_assets)
    driven = load(smollm2_files, num_blocks=128, max_model_len=512)
    return alone(driven, [tokenizer.encode(text) for text in TEXTS], 6)


def test_with_strangers_and_late_results(smollm2: Subject) -> None:
    smollm2.check(late_strangers(smollm2))


def test_in_chunks_over_a_cached_prefix(smollm2: Subject) -> None:
    smollm2.check(cached_chunks(smollm2))


def test_preempted_every_third_step_and_by_a_tiny_pool(smollm2: Subject) -> None:
    smollm2.check(tiny_pool(smollm2, force_preempt_every=3))


def test_resumed(smollm2: Subject) -> None:
    smollm2.check(run(smollm2.driven, smollm2.requests(4)), 4)


@pytest.fixture(scope="module")
def judge() -> Any:
    from tests.model import reference_models

    return reference_models


@pytest.fixture(scope="module")
def reference(judge: Any, smollm2_files: ModelFiles) -> Any:
    return judge.from_llama_gguf(smollm2_files.path)


def test_writes_what_transformers_writes(smollm2: Subject, judge: Any, reference: Any) -> None:
    for i, prompt in enumerate(smollm2.prompts):
        tokens = smollm2.alone[f"greedy {i}"]
        # Each is the reference's choice after the ones before it: the reference would have written the same.
        logits = judge.logits(reference, prompt + tokens)[len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()


def test_scores_prompts_and_gives_vectors_as_transformers_does(
    smollm2: Subject, smollm2_assets: TextAssets, judge: Any, reference: Any
) -> None:
    prompt = Tokenizer.from_assets(smollm2_assets).encode("A loom has a warp, and across it runs the weft.")
    asked = [
        request("scored", prompt, 1, prompt_logprobs=2),
        *(embedding(f"{kind} 0", prompt, kind) for kind in Pooling),
    ]
    outcome = run(smollm2.driven, asked)
    assert_scores(outcome.outputs["scored"].prompt_logprobs, judge.logits(reference, prompt), prompt, 2)
    for pooling in Pooling:
        expected = expected_vector(reference, prompt, pooling)
        torch.testing.assert_close(vector(outcome, f"{pooling} 0"), expected, atol=1e-5, rtol=0)
