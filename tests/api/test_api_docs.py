"""docs/API.md: its examples work, and it leaves no route out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import weft.backends
from tests.api.http import request
from tests.api.says import STYLES
from tests.api.scripted_engine import PAINTER, ScriptedEngine
from weft.backends import BaseEngine, registry
from weft.config import load

PAGE = (Path(__file__).parents[2] / "docs" / "API.md").read_text()
EXAMPLES = re.findall(
    r"^(?:ID=\$\()?curl (?:-s )?http://localhost:8000(\S+) (?:-H '[^']*' )?--json '([^']*)'", PAGE, re.MULTILINE
)


def test_examples_are_found() -> None:
    assert len(EXAMPLES) == PAGE.count(" --json '") >= 8


@pytest.mark.parametrize(("path", "body"), EXAMPLES, ids=[path for path, _ in EXAMPLES])
def test_an_example_works(path: str, body: str) -> None:
    engine = ScriptedEngine(images=PAINTER)
    engine.styles = STYLES
    body = body.replace("[504, 3426, 314]", "[104, 105]")  # The scripted model has no more than 256 tokens.
    config = load({"served_model_name": "smollm2"}, env={})
    response = request(engine, "POST", path, config, json=json.loads(body))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("code", re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
def test_a_python_example_runs(code: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    small = 'image_model="none", num_blocks=64, threads=1, max_model_len=512'
    exec(code.replace('"smollm2"', repr(str(tiny_model))).replace("max_model_len=512", small), {})


def test_every_name_of_the_package_is_told_of() -> None:
    for name in set(weft.backends.__all__) - {"start_engine"} | {"LLM"}:
        assert f"`{name}" in PAGE or f" {name}" in PAGE, name
    for name, member in vars(BaseEngine).items():
        if not name.startswith("_") and (callable(member) or isinstance(member, property)):
            assert f"`{name}" in PAGE, name


def test_every_route_is_told_of() -> None:
    for path in request(ScriptedEngine(), "GET", "/openapi.json").json()["paths"]:
        assert path in PAGE, path
