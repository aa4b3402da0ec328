"""Output sampled within a schema's grammar fits the schema, whatever a model's logits are.

Random logits stand for a model that knows nothing; the sampler and the constraints are the engine's own.
"""

from __future__ import annotations

import json

import pytest
import torch
from jsonschema import Draft202012Validator, FormatChecker

from tests.text.grammars.grammar_maker import grammars
from tests.text.grammars.schemas import SCHEMAS
from weft.kernels import REFERENCE
from weft.plan import Row, RowAdmission
from weft.text.grammars.specs import JsonSchemaSpec, vocabulary_of
from weft.text.tokenizer import Tokenizer
from weft.types import SamplingParams, TextAssets
from weft.worker.grammar_masks import follow, masks_of
from weft.worker.rows import RowTable
from weft.worker.sampler import sample

SEEDS = (1, 3)
MOST_TOKENS = 150


@pytest.fixture(scope="module")
def outputs(smollm2_assets: TextAssets) -> dict[str, list[str]]:
    """Sample what each schema's grammar allows from random logits, at temperatures from 1 to 2."""
    tokenizer = Tokenizer.from_assets(smollm2_assets)
    made = grammars(tokenizer, [JsonSchemaSpec(schema=schema) for schema in SCHEMAS.values()])
    end = tokenizer.eos_token_ids[0]
    # Wider than the vocabulary, as models' logits often are.
    width = tokenizer.vocab_size + 100
    vocabulary = vocabulary_of(tokenizer)
    rows = range(len(made) * len(SEEDS))
    table = RowTable(len(rows), MOST_TOKENS + 1, 1, torch.device("cpu"))
    table.constraints.learn(vocabulary.tokens, vocabulary.special_ids, vocabulary.eos_token_ids, width)
    for row in rows:
        seed = SEEDS[row // len(made)]
        params = SamplingParams(temperature=0.5 + seed / 2, seed=seed, grammar=made[row % len(made)])
        admission = RowAdmission(row, [0], 1, params, [end])
        table.settings.admit(admission)
        table.constraints.admit(admission)
    written: dict[int, list[int]] = {row: [] for row in rows}
    generator = torch.Generator().manual_seed(0)
    closes = torch.tensor([2.0 * (token[:1] in (b'"', b"}", b"]")) for token in vocabulary.tokens] + [9.0] * 100)
    active = list(rows)
    for position in range(1, MOST_TOKENS):
        # Ever more inclined to come to an end.
        logits = torch.randn(width, generator=generator) + closes * position / 2
        for part in torch.tensor(active).split(32):
            numbers = part.tolist()
            batch = logits.repeat(len(numbers), 1)
            sampling = [Row(row, position - 1, 1, [], True) for row in numbers]
            constrained = table.constraints.among(sampling)
            assert len(constrained) == len(numbers)
            best = REFERENCE.greedy(batch)
            masks = masks_of(constrained, sampling, {})
            sampled = sample(batch, *best, table, numbers, [position] * len(numbers), REFERENCE, masks)
            tokens = {row: [got] for row, got in zip(numbers, sampled.read(), strict=True)}
            follow(constrained, tokens)
            for row, (got,) in tokens.items():
                assert not got.error, got.error
                written[row].append(got.token_id)
        active = [row for row in active if written[row][-1] != end]
        if not active:
            break
    assert not active, [list(SCHEMAS)[row % len(made)] for row in active]
    texts = [tokenizer.decode(written[row]) for row in rows]
    return {name: texts[i :: len(made)] for i, name in enumerate(SCHEMAS)}


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_output_fits(outputs: dict[str, list[str]], name: str) -> None:
    validator = Draft202012Validator(SCHEMAS[name], format_checker=FormatChecker(["uuid", "ipv4", "email"]))
    for text in outputs[name]:
        validator.validate(json.loads(text))


def test_outputs_differ(outputs: dict[str, list[str]]) -> None:
    """Different outputs are needed for the tests above to prove anything."""
    assert sum(len(set(texts)) > 1 for texts in outputs.values()) > len(SCHEMAS) // 2
