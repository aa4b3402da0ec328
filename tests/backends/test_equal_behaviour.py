"""The tables of docs/backends.md against the code: what each engine does, its defaults, where the test cases are."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from weft.backends import BaseEngine, create_engine
from weft.backends.contract import Abilities, Deltas
from weft.backends.native import NativeDeltas, NativeEngine, start_native
from weft.backends.openai_server.peer_stream import RemoteDeltas
from weft.backends.openai_server.remote_engine import RemoteEngine
from weft.backends.openai_server.servers import MINDIE, TENSORRT, WEFT, abilities_of
from weft.backends.registry import BUILT_IN
from weft.backends.vllm.arguments import ASCEND, CPU, CUDA_ASYNC, CUDA_SYNC, Kind, arguments_of
from weft.backends.vllm.vllm_engine import ABILITIES as VLLM
from weft.backends.vllm.vllm_engine import VllmEngine
from weft.checkpoint.model_files import ModelFiles
from weft.compat.hosted import HostedEngine
from weft.config import load
from weft.errors import ConfigError
from weft.machine.planner import AUTO_DTYPE, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from weft.options import CacheOptions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/backends.md").read_text()
COLUMNS = ["streaming", "batch", "LoRA", "quantisation", "abort", "seed", "logprobs", "stop"]
ABILITIES: dict[str, Abilities] = {
    "native": NativeEngine.abilities,
    "cuda-vllm-async": VLLM,
    "cuda-vllm": VLLM,
    "cpu-vllm": VLLM,
    "ascend-vllm": VLLM,
    "cuda-trt, tokens": abilities_of(TENSORRT, tokens=True),
    "cuda-trt, text": abilities_of(TENSORRT, tokens=False),
    "ascend-mindie, tokens": abilities_of(MINDIE, tokens=True),
    "ascend-mindie, text": abilities_of(MINDIE, tokens=False),
    "remote, tokens": abilities_of(WEFT, tokens=True),
    "remote, text": abilities_of(WEFT, tokens=False),
}
"""The best that an engine can be; the footnotes tell of less."""
FILES = ModelFiles(name="tiny", kind="huggingface", path=Path("/models/tiny"), weight_files=[])


def table_under(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, its own heading first."""
    section = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = re.findall(r"^\|(.+)\|$", section, re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines if not set(line) <= set("-|")]


def test_every_engine_is_in_the_table_as_it_is_in_the_code() -> None:
    [heading, *rows] = table_under("What each does")
    assert heading == ["engine", *COLUMNS]
    assert {name.split(",")[0] for name, *_ in rows} == set(BUILT_IN)
    table = {name: dict(zip(COLUMNS, cells, strict=True)) for name, *cells in rows}
    assert set(table) == {*ABILITIES, "hybrid"}
    for name, abilities in ABILITIES.items():
        engine = name.split(",")[0]
        can = {"LoRA": abilities.lora, "seed": abilities.seed, "logprobs": abilities.logprobs}
        can |= {"stop": abilities.stop_tokens, **dict.fromkeys(("streaming", "abort"), streams_and_ends(engine))}
        can |= {"batch": asks_at_once(engine), "quantisation": quantises(engine)}
        assert {column: table[name][column][0] == "✓" for column in COLUMNS} == can, name


def engine_class(name: str) -> type:
    """Of what a line of the table starts."""
    module = str(BUILT_IN[name].start).partition(":")[0]
    return {
        "weft.backends.native": NativeEngine,
        "weft.backends.vllm.vllm_engine": VllmEngine,
        "weft.backends.openai_server.start": RemoteEngine,
    }[module]


def streams_and_ends(name: str) -> bool:
    """Its answers are read one delta after the other, and closed before their end, by code of their own."""
    answers = {NativeEngine: NativeDeltas, VllmEngine: NativeDeltas, RemoteEngine: RemoteDeltas}[engine_class(name)]
    returned = get_type_hints(engine_class(name).submit)["return"]
    return returned in (answers, Deltas) and {"__anext__", "aclose"} <= vars(answers).keys()


def asks_at_once(name: str) -> bool:
    """By the one batch that is asked for at once; that of BaseEngine asks for one after the other."""
    return type(create_engine(name)).infer_batch is HostedEngine.infer_batch is not BaseEngine.infer_batch


def quantises(name: str) -> bool:
    """Weights that are quantised are served: vLLM is told how, the native engine reads GGUF and refuses the setting,
    and of a server there is nothing to tell."""
    config = load({"engine": name, "quantization": "fp8"}, env={})
    kinds = {kind.name: kind for kind in (CUDA_ASYNC, CUDA_SYNC, CPU, ASCEND)}
    if name in kinds:
        return bool(arguments_of(config, FILES, kinds[name])["quantization"] == "fp8")
    if BUILT_IN[name].needs_url:
        return True
    with pytest.raises(ConfigError, match="Serve a GGUF file"):
        asyncio.run(start_native(config))
    return "gguf" in get_args(get_type_hints(ModelFiles)["kind"])


def test_every_mark_has_its_footnote() -> None:
    marks = str.maketrans("¹²³⁴⁵⁶⁷⁸", "12345678")
    used = {mark for row in table_under("What each does")[1:] for cell in row[1:] for mark in cell[1:].translate(marks)}
    section = PAGE.split("\n## What each does\n", 1)[1].split("\n## ", 1)[0]
    assert used == set(re.findall(r"^(\d)\. ", section, re.MULTILINE))


@pytest.mark.parametrize("kind", [CUDA_ASYNC, CUDA_SYNC, CPU, ASCEND])
def test_defaults_are_equal_whichever_engine_computes(kind: Kind) -> None:
    """What the native engine takes from the configuration and its tables, vLLM is given in its arguments."""
    config = load({"engine": kind.name}, env={})
    assert config.cache == CacheOptions(gpu_memory_utilization=0.75, enable_prefix_caching=True)
    given = arguments_of(config, FILES, kind)
    assert given["enable_prefix_caching"] is True and given["trust_remote_code"] is False
    assert given.get("gpu_memory_utilization") == (None if kind is CPU else 0.75)
    assert given["dtype"] == AUTO_DTYPE[kind.place]
    assert given["max_num_seqs"] == MAX_NUM_SEQS[kind.place]
    assert given["max_num_batched_tokens"] == MAX_NUM_BATCHED_TOKENS[kind.place]


@pytest.mark.parametrize("number", range(1, 11))
def test_the_test_cases_are_where_the_page_says(number: int) -> None:
    rows = {row[0]: row for row in table_under("The ten test cases")[1:]}
    case = f"TC-{number:03}"
    ours, theirs = (re.findall(r"`(\S+\.py)`", cell) for cell in rows[case][2:])
    assert ours and theirs
    for file in (*ours, *(f"tests/backends/vllm/{name}" for name in theirs)):
        named = re.search(rf"def test_\w*{case.lower().replace('-', '_')}_", (ROOT / file).read_text())
        assert named, f"{file} has no test of {case}"
