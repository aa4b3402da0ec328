"""Patterns of module names are read as PEFT means them, and matched in a time that no pattern can stretch."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import EFFORT
from weft.checkpoint.adapter_files import MAX_PATTERN_CHARACTERS, ModulePattern
from weft.errors import ModelError

NAMES = [
    f"{prefix}layers.{layer}.{block}"
    for prefix in ("", "model.", "model.language_model.")
    for layer in (0, 12)
    for block in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
] + ["lm_head", "q_proj", ""]
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:q_proj|v_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|"
    r"ffn|dense)\.(?:(?:q_proj|v_proj|down_proj)))"
)
ATOMS = st.sampled_from([*"qv_o0.", r"\.", r"\d", r"\w", "[qv]", "[^.]", "[0-9]", "proj", "layers"])
REPEATED = st.tuples(ATOMS, st.sampled_from(["", "", "*", "+", "?", "*?", "+?", "{1,}"])).map("".join)
SEQUENCES = st.lists(REPEATED, max_size=5).map("".join)
PATTERNS = st.recursive(
    SEQUENCES,
    lambda inner: (
        st.tuples(
            st.sampled_from(["(", "(?:"]),
            st.lists(inner, min_size=1, max_size=3).map("|".join),
            st.sampled_from([")", ")?"]),
        ).map("".join)
        | st.tuples(inner, inner).map("".join)
    ),
    max_leaves=5,
)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(q_proj|v_proj)",
        r"^model\.layers\.\d+\.self_attn\.[qv]_proj$",
        ".*(q|v)_proj",
        "(model.)?layers.0.mlp.*",
        r".*\.(?:self_attn|mlp)\.(?:q|down)_proj|lm_head",
        UNSLOTH,
    ],
)
def test_a_pattern_of_the_wild_means_what_peft_means(pattern: str) -> None:
    read = ModulePattern(pattern)
    assert [name for name in NAMES if read.matches(name)] == [name for name in NAMES if re.fullmatch(pattern, name)]


@settings(max_examples=100 * EFFORT)
@given(pattern=PATTERNS, name=st.one_of(st.sampled_from(NAMES), st.text("qv_o0.-", max_size=12)))
def test_every_pattern_that_is_read_is_matched_as_python_does(pattern: str, name: str) -> None:
    read = ModulePattern(pattern)
    assert read.matches(name) == (re.fullmatch(pattern, name) is not None)
    assert read.ends(name) == (re.match(rf"(.*\.)?({pattern})\Z", name) is not None)


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+", "(a|b)*", "(a){2,}", "a{2}", "(?=a)", "(?i)a", "(?P<n>a)", r"\1", r"\s", "[a-f]", "[", "[]", "a**", "*",
     "(", "a)", "!", "(" * 9 + ")" * 9, "\\", "é"],
)  # fmt: skip
def test_other_syntax_is_refused_and_the_way_out_told(pattern: str) -> None:
    with pytest.raises(ModelError, match="cannot be used") as refused:
        ModulePattern(pattern)
    assert "as a list" in refused.value.hint


def test_no_pattern_takes_long() -> None:
    """The regular expression of the same text would take for ever, and this test with it."""
    pattern = ModulePattern(".*" * (MAX_PATTERN_CHARACTERS // 2 - 1) + "z")
    assert not pattern.matches("model.layers.0.self_attn.q_proj")
