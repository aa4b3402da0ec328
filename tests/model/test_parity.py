"""Every family gives the logits and the tokens that transformers gives, from every kind of file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_models
from tests.tiny_models import SPECS
from tests.worker.driving import Driven, load, request, run, under_reference, watched_logits
from weft.kernels import REFERENCE, AttentionBatch, Ops, ops_for
from weft.model.dense import DenseModel

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 32
IN_GGUF = [name for name, spec in SPECS.items() if spec.in_gguf]
PROMPTS = [
    [7, 3, 300, 41, 9, 9, 120],
    [(37 * i + 11) % tiny_models.VOCAB_SIZE for i in range(83)],
]


@pytest.fixture(scope="module")
def judge() -> Any:
    from tests.model import reference_models

    return reference_models


@pytest.fixture(scope="module")
def references(judge: Any, tiny_directory: Callable[[str], Path]) -> Callable[[str], Any]:
    """transformers' own model of a tiny directory, loaded once."""
    loaded: dict[str, Any] = {}

    def reference(name: str) -> Any:
        if name not in loaded:
            loaded[name] = judge.from_directory(tiny_directory(name))
        return loaded[name]

    return reference


def assert_same(judge: Any, reference: Any, driven: Driven, prompt: list[int]) -> list[int]:
    """The logits of every step of a request that runs alone, and so its greedy tokens; returns them."""
    with watched_logits() as seen:
        tokens = run(driven, [request("r", prompt, NUM_TOKENS)]).tokens("r")
    expected = judge.logits(reference, prompt + tokens)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.cat(seen), expected, atol=1e-4, rtol=0)
    # Each is the reference's choice after the ones before it: the reference would have written the same.
    assert tokens == expected.argmax(-1).tolist()
    assert len(tokens) == NUM_TOKENS and len(set(tokens)) > 4, "a model that repeats itself proves little"
    return tokens


@pytest.mark.parametrize("name", SPECS)
def test_a_directory_gives_what_transformers_gives(
    name: str, judge: Any, references: Callable[[str], Any], tiny_directory: Callable[[str], Path]
) -> None:
    driven = load(tiny_directory(name))
    for prompt in PROMPTS:
        tokens = assert_same(judge, references(name), driven, prompt)
        assert tokens == judge.greedy(references(name), prompt, NUM_TOKENS)
    assert_same(judge, references(name), under_reference(driven), PROMPTS[1])


@pytest.mark.parametrize("name", SPECS)
def test_a_directory_as_transformers_saves_it(
    name: str, judge: Any, references: Callable[[str], Any], tmp_path: Path
) -> None:
    references(name).save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same(judge, references(name), load(tmp_path), PROMPTS[1])


@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf_in_full_precision(
    name: str, judge: Any, references: Callable[[str], Any], tiny_gguf: Callable[[str, str], Path]
) -> None:
    driven = load(tiny_gguf(name, "F32"))
    for prompt in PROMPTS:
        assert_same(judge, references(name), driven, prompt)


@pytest.mark.parametrize("type_name", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf_in_blocks(
    name: str, type_name: str, judge: Any, references: Callable[[str], Any], tiny_gguf: Callable[[str, str], Path]
) -> None:
    reference = judge.from_state(references(name).config, tiny_models.quantised_state(name, type_name))
    assert_same(judge, reference, load(tiny_gguf(name, type_name)), PROMPTS[1])


@pytest.mark.parametrize("ops", [REFERENCE, ops_for("cpu")], ids=["reference", "cpu"])
@pytest.mark.parametrize("name", SPECS)
def test_one_forward_pass_has_the_same_logits_everywhere(
    name: str, ops: Ops, judge: Any, references: Callable[[str], Any], tiny_directory: Callable[[str], Path]
) -> None:
    loaded = load(tiny_directory(name)).runner.stepper
    model = DenseModel(loaded.model.config, loaded.model.weights, ops, 256)
    prompt = PROMPTS[1]
    length, size = len(prompt), 16
    # Scattered blocks, so that a table is needed to find them.
    blocks = torch.arange(2 * -(-length // size), 0, -2)
    positions = torch.arange(length)
    batch = AttentionBatch(
        num_decodes=0,
        query_starts=torch.tensor([0, length]),
        lengths=torch.tensor([length]),
        block_tables=blocks[None],
        slots=blocks[positions // size] * size + positions % size,
    )
    with torch.inference_mode():
        hidden = model.forward(torch.tensor(prompt), positions, torch.zeros_like(loaded.kv_cache), batch)
        ours = model.logits(hidden)
    torch.testing.assert_close(ours, judge.logits(references(name), prompt), atol=1e-4, rtol=0)
