"""Tests which switches are off, and in which engines."""

from __future__ import annotations

import os

import pytest

from weft.bench.mixed import without
from weft.errors import ConfigError
from weft.switches import SWITCHES, VARIABLE, switched_off


def test_names_are_read_from_a_list() -> None:
    assert switched_off({}) == switched_off({VARIABLE: " , "}) == set()
    assert switched_off({VARIABLE: "graphs, gemv,"}) == {"graphs", "gemv"}
    with pytest.raises(ConfigError, match="no switch 'graph'") as refused:
        switched_off({VARIABLE: "gemv,graph"})
    assert all(name in refused.value.hint for name in SWITCHES)


@pytest.mark.parametrize("before", [None, "", "graphs"])
def test_what_is_switched_off_for_a_while_adds_to_what_is_anyway(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    anyway = switched_off(os.environ)
    with without():
        assert switched_off(os.environ) == anyway
    with pytest.raises(RuntimeError), without("denoise-steps", "gemv"):
        assert switched_off(os.environ) == anyway | {"denoise-steps", "gemv"}
        raise RuntimeError
    assert os.environ.get(VARIABLE) == before
    with pytest.raises(ConfigError, match="no switch 'images'"), without("images"):
        pytest.fail("there is no such switch")
    assert os.environ.get(VARIABLE) == before
