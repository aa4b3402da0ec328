"""What a mask lets through: the grammar's tokens, the ends when it may end, and nothing beyond the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from weft.errors import InvalidRequest
from weft.kernels import REFERENCE
from weft.plan import Row, RowAdmission, Sampled
from weft.types import SamplingParams
from weft.worker import grammar_masks as constraints_module
from weft.worker.grammar_masks import Masks, follow, masks_of, rule_out
from weft.worker.rows import RowTable
from weft.worker.sampler import sample

TOKENS = [b"<e>", b"a", b"b", b"ab", b"<x>", b"", b"a", b"<e2>"]
SPECIALS = [0, 4, 7]
ENDS = [0, 7]
WIDTH = 70
OPTIONS = '\n%llguidance {"no_forcing": true}\n'


def table_of(*grammars: str, **params: object) -> RowTable:
    """A row for each grammar; none for an empty one."""
    table = RowTable(len(grammars), 20, 1, torch.device("cpu"))
    table.constraints.learn(TOKENS, SPECIALS, ENDS, WIDTH)
    for row, grammar in enumerate(grammars):
        admit(table, row, grammar, [1], **params)
    return table


def admit(table: RowTable, row: int, grammar: str, tokens: list[int], **params: object) -> None:
    asked = SamplingParams(**{"temperature": 0.0, "seed": 0, **params}, grammar=grammar and grammar + OPTIONS)
    admission = RowAdmission(row, tokens, 1, asked, ENDS)
    table.settings.admit(admission)
    table.constraints.admit(admission)


def rows(*numbers: int) -> list[Row]:
    return [Row(number, 0, 1, [], True) for number in numbers]


def masks(table: RowTable, *numbers: int, draft: Sequence[int] = ()) -> Masks:
    """The masks of these rows, the first of which has the draft."""
    sampling = rows(*[numbers[0]] * len(draft), *numbers)
    return masks_of(table.constraints.among(sampling), sampling, {numbers[0]: draft})


def along(table: RowTable, *draft: int) -> list[list[int]]:
    """What row 0 may sample next, and behind each drafted token."""
    made = masks(table, 0, draft=draft)
    logits = torch.zeros(1 + len(draft), WIDTH)
    rule_out(logits, torch.from_numpy(made.places), torch.from_numpy(made.words).flatten())
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def allowed(table: RowTable) -> list[int]:
    return along(table)[0]


def advance(table: RowTable, *tokens: int) -> list[Sampled]:
    masks(table, 0)
    sampled = {0: [Sampled(token) for token in tokens]}
    follow(table.constraints.among(rows(0)), sampled)
    return sampled[0]


def test_a_mask_has_the_grammars_tokens_and_the_ends_where_it_may_end() -> None:
    table = table_of('start: "a" "b"?')
    assert allowed(table) == [1, 3, 6]
    advance(table, 1)
    assert allowed(table) == [0, 2, 7]
    advance(table, 2)
    assert allowed(table) == ENDS, "complete: nothing but an end"
    advance(table, 7)
    assert not table.constraints.among(rows(0))[0].error


def test_along_a_draft_each_position_has_a_mask() -> None:
    table = table_of('start: "a" "b" "a"?')
    assert along(table, 1, 2, 6) == [[1, 3, 6], [2], [0, 1, 6, 7], ENDS]
    assert allowed(table) == [1, 3, 6], "the draft was a guess"
    advance(table, 3)
    assert along(table, 0, 1)[0] == [0, 1, 6, 7], "nothing is behind an end"
    advance(table, 1)
    assert allowed(table) == ENDS


def test_a_draft_is_followed_up_to_the_token_that_the_grammar_refuses() -> None:
    table = table_of('start: "a" "b" "a"')
    assert along(table, 1, 1, 2, 60)[:2] == [[1, 3, 6], [2]]
    assert along(table, 4, 1)[0] == [1, 3, 6]
    advance(table, 1, 2)
    assert along(table, 1, 0)[:2] == [[1, 6], ENDS]
    assert along(table, 1, 7, 1)[:2] == [[1, 6], ENDS], "nothing is behind an end"
    assert not table.constraints.among(rows(0))[0].error
    assert allowed(table) == [1, 6]


def test_a_resumed_row_goes_on_where_it_was() -> None:
    table = table_of("")
    admit(table, 0, 'start: "a" "b"?', [5, 1])
    assert allowed(table) == [0, 2, 7]


def test_a_special_token_is_no_text() -> None:
    assert allowed(table_of('start: "<x>" | "a"')) == [1, 6]
    assert allowed(table_of('start: <[4]> | "b"')) == [2, 4]


def test_a_released_row_and_a_row_without_a_grammar_have_none() -> None:
    table = table_of('start: "a"', "")
    assert list(table.constraints.among(rows(1, 0))) == [0]
    table.constraints.release(0)
    assert table.constraints.among(rows(1, 0)) == {}
    admit(table, 0, "", [1])
    assert table.constraints.among(rows(0)) == {}


def test_a_mask_wins_over_every_bias_and_only_in_its_own_row() -> None:
    table = table_of('start: "b"', "", logit_bias={1: 100.0, 60: 100.0}, logprobs=1)
    logits = torch.zeros(2, WIDTH)
    logits[:, 69] = 5.0
    got = sample(logits, *REFERENCE.greedy(logits), table, [0, 1], [1, 1], REFERENCE, masks(table, 0, 1)).read()
    assert [one.token_id for one in got] == [2, 1]
    assert table.tokens[:2, 1].tolist() == [2, 1], "the next step goes on with these"
    total = math.log(69 + math.exp(5))
    assert got[0].logprob is not None
    assert got[0].logprob.logprob == pytest.approx(-total), "of the model's own distribution"
    assert got[0].logprob.top[0] == (69, pytest.approx(5 - total))


def test_logits_that_are_no_numbers_fail_their_row_alone() -> None:
    table = table_of('start: "a" "b"', 'start: "a" "b"')
    logits = torch.zeros(2, WIDTH)
    logits[0, 3] = math.nan
    best = REFERENCE.greedy(logits)
    read = sample(logits, *best, table, [0, 1], [1, 1], REFERENCE, masks(table, 0, 1)).read()
    got = {row: [one] for row, one in enumerate(read)}
    follow(table.constraints.among(rows(0, 1)), got)
    assert "not a number" in got[0][0].error and got[1] == [Sampled(1)]


def test_a_token_that_does_not_fit_ends_the_row_with_an_error() -> None:
    table = table_of('start: "a" "b"')
    advance(table, 2)
    (lost,) = advance(table, 2, 2)
    assert "cannot be followed" in lost.error


def test_built_grammars_are_kept_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints_module, "CACHED_GRAMMARS", 2)
    build = table_of().constraints.build
    first = build('start: "a"')
    assert build('start: "a"') is first
    build('start: "b"'), build('start: "a"'), build('start: "ab"')
    assert build('start: "a"') is first, "used last but one"
    build('start: "b"'), build('start: "ab"')
    assert build('start: "a"') is not first
    with pytest.raises(InvalidRequest, match="nobody"):
        build("start: nobody").result()


def test_an_engine_without_a_vocabulary_or_an_end_can_follow_no_grammar() -> None:
    table = RowTable(1, 20, 1, torch.device("cpu"))
    with pytest.raises(InvalidRequest, match="no token that ends"):
        table.constraints.build('start: "a"')
    table.constraints.learn(TOKENS, SPECIALS, [7], 7)
    with pytest.raises(InvalidRequest, match="no token that ends"):
        table.constraints.build('start: "a"')


def test_a_vocabulary_wider_than_the_logits_is_cut() -> None:
    table = RowTable(1, 20, 1, torch.device("cpu"))
    table.constraints.learn(TOKENS, SPECIALS, ENDS, 5)
    admit(table, 0, 'start: "a"?', [1])
    assert masks(table, 0).words.tolist() == [[0b00011]]
