"""Benchmarks with required figures report them by their exit code. TC-005 and TC-006 are such commands; the figures
need a machine of their own, so only the commands are tested here."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.e2e.tiny_server import TinyServer
from weft.bench.commands import app as bench
from weft.bench.report import Required

SMALL = {"WEFT_MAX_MODEL_LEN": "512", "WEFT_KV_CACHE_MEMORY_MB": "16", "WEFT_THREADS": "1", "WEFT_IMAGE_MODEL": "none"}
EASY, HARD = ("60000", "0.01"), ("0.0001", "1e9")
"""Milliseconds to the first token, and tokens a second."""


def offline(model: Path, first_token_ms: str, tokens_per_s: str) -> Result:
    work = "offline --batch-sizes 1 --prompt-lengths 16 --requests 1 --output-tokens 4 --runs 1 --device cpu"
    required = ("--require-first-token-ms", first_token_ms, "--require-tokens-per-s", tokens_per_s)
    return CliRunner().invoke(bench, [*work.split(), str(model), *required], env=SMALL)


def test_tc_005_tc_006_what_is_reached_is_a_pass(tiny_model: Path) -> None:
    done = offline(tiny_model, *EASY)
    assert done.exit_code == 0, done.output
    assert done.output.count("pass") == 2 and "FAIL" not in done.output
    assert "first token after 16" in done.output and "< 60000 ms" in done.output


def test_tc_005_tc_006_what_is_missed_ends_with_1(tiny_model: Path) -> None:
    done = offline(tiny_model, EASY[0], HARD[1])
    assert done.exit_code == 1
    assert done.output.count("pass") == 1 and done.output.count("FAIL") == 1
    assert "≥ 1e+09 tok/s" in done.output


@pytest.mark.parametrize(("bounds", "code"), [(EASY, 0), (HARD, 1)])
def test_tc_005_tc_006_over_http(long_server: TinyServer, bounds: tuple[str, str], code: int) -> None:
    """Of a server that runs; one that the command starts is measured in test_serve.py."""
    work = f"serve {long_server.url} --work 1x2:16:8 --runs 1 --vocabulary 200"
    required = ("--require-first-token-ms", bounds[0], "--require-tokens-per-s", bounds[1])
    done = CliRunner().invoke(bench, [*work.split(), *required])
    assert done.exit_code == code, done.output
    assert done.output.count("FAIL" if code else "pass") == 2


def test_a_bound_is_kept_or_not() -> None:
    required = Required(first_token_ms=500, tokens_per_s=50)
    assert [each.kept for each in required.first_token("a", 499.9) + required.first_token("b", 500)] == [True, False]
    assert [each.kept for each in required.speed("a", 50) + required.speed("b", 49.9)] == [True, False]
    assert Required().first_token("a", 1) == Required().speed("a", 1) == []


def test_decoding_with_adapters_has_lines_of_its_own(tiny_model: Path) -> None:
    work = "offline --batch-sizes 3 --prompt-lengths 16 --requests 1 --output-tokens 4 --runs 1 --device cpu"
    adapters = ("--adapters", "9", "--adapter-rank", "2")
    done = CliRunner().invoke(bench, [*work.split(), *adapters, str(tiny_model)], env=SMALL)
    assert done.exit_code == 0, done.output
    assert [line for line in done.output.splitlines() if "decode, batch 3, 9 adapters" in line]
