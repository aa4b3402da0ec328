"""Grammars on the GPU: the tokens of the CPU, whatever the batch and the order of results, and nothing that waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from msgspec.structs import replace

from tests import tiny_models
from tests.gpu.test_engine import SEEDED, forbid_waiting, on_gpu
from tests.text.grammars.grammar_maker import grammars
from tests.tiny_models import END_OF_TURN, VOCAB_SIZE, tokenizer_json
from tests.worker.driving import Driven, load, request, run, under_reference
from tests.worker.test_grammar_invariance import PATTERN, SCHEMA
from weft.text.grammars.specs import JsonSchemaSpec, RegexSpec, vocabulary_of
from weft.text.tokenizer import Tokenizer
from weft.types import Request, TextAssets
from weft.worker.grammar_masks import rule_out

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 9, 200, 31], list(range(3, 60))]
TOKENIZER = Tokenizer.from_assets(TextAssets(kind="json", tokenizer_json=tokenizer_json(), eos_token_ids=[END_OF_TURN]))


def taught(driven: Driven) -> Driven:
    words = vocabulary_of(TOKENIZER)
    driven.runner.constraints.learn(words.tokens, words.special_ids, words.eos_token_ids, VOCAB_SIZE)
    return driven


def work() -> list[Request]:
    schema, pattern = grammars(TOKENIZER, [JsonSchemaSpec(schema=SCHEMA), RegexSpec(pattern=PATTERN)])
    requests = []
    for i, prompt in enumerate(PROMPTS):
        for kind, params in (("greedy", {}), ("seeded", SEEDED)):
            requests.append(request(f"{kind} free {i}", prompt, 30, **params))
            for form, grammar in (("schema", schema), ("pattern", pattern)):
                made = request(f"{kind} {form} {i}", prompt, 100, grammar=grammar, **params)
                requests.append(replace(made, stop_token_ids=[END_OF_TURN]))
    return requests


def test_the_tokens_are_the_cpus(tmp_path: Path) -> None:
    folder = tiny_models.save_directory("llama3", tmp_path / "llama3")
    asked = work()
    expected = run(taught(under_reference(load(folder))), asked).outputs
    gpu = taught(on_gpu(folder))
    forbid_waiting(gpu)
    for condition in ({}, {"overlap": True}, {"max_prefill_chunk": 7, "overlap": True}, {"force_preempt_every": 3}):
        got = run(gpu, asked, **condition)
        for name, output in expected.items():
            assert got.tokens(name) == output.token_ids, f"{name} under {condition}"


@pytest.mark.parametrize("num_rows", [1, 33])
def test_masks_are_unpacked_without_waiting(num_rows: int) -> None:
    width = 49_152 + 40
    generator = torch.Generator().manual_seed(num_rows)
    words = torch.randint(-(2**63), 2**63 - 1, (num_rows, -(-width // 64)), generator=generator)
    logits = torch.randn(num_rows + 3, width, generator=generator)
    places = torch.randperm(num_rows + 3, generator=generator)[:num_rows]
    there, places_there, words_there = logits.cuda(), places.cuda(), words.flatten().cuda()
    rule_out(logits, places, words.flatten())
    torch.cuda.set_sync_debug_mode("error")
    try:
        rule_out(there, places_there, words_there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(there.cpu(), logits)
