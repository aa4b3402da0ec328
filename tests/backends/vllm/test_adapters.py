"""Adapters have numbers that are counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.backends.vllm.adapters import Adapters
from weft.errors import InvalidRequest, ModelError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    return tmp_path


def test_numbers_are_counted_from_one_and_never_used_again(folder: Path) -> None:
    adapters = Adapters({"a": str(folder), "b": str(folder)})
    assert [adapters.named(name).number for name in adapters] == [1, 2]
    adapters.unload("a")
    assert adapters.load("a", str(folder)).number == 3
    assert list(adapters) == ["b", "a"]


def test_a_name_that_is_not_there_is_the_requests_fault(folder: Path) -> None:
    adapters = Adapters({"a": str(folder)})
    with pytest.raises(InvalidRequest, match="There are: a"):
        adapters.named("b")
    with pytest.raises(InvalidRequest):
        adapters.unload("b")


def test_a_name_is_given_once(folder: Path) -> None:
    adapters = Adapters({"a": str(folder)})
    for name in ("a", ""):
        with pytest.raises(ModelError, match=r"a name|already"):
            adapters.load(name, str(folder))


@pytest.mark.parametrize("written", [None, "{", "{}", '{"r": 65}', '{"r": "many"}', "[]"])
def test_what_is_no_adapter_is_refused_before_vllm_sees_it(tmp_path: Path, written: str | None) -> None:
    if written is not None:
        (tmp_path / "adapter_config.json").write_text(written)
    with pytest.raises(ModelError, match=r"adapter_config\.json|rank 65"):
        Adapters({"a": str(tmp_path)})
