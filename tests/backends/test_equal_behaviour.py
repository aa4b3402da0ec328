"""The tables of docs/backends.md against what runs: every cell that is marked as shown names a case that runs it here,
or a test that runs it where vLLM is."""

from __future__ import annotations

import ast
import asyncio
import random
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from gguf import GGMLQuantizationType, GGUFReader
from msgspec import Struct

from tests.generation import sample
from tests.tiny_adapters import save_adapter
from tests.waiting import PATIENCE, until
from weft.api.app import build_app
from weft.api.http_protocol import protocol_factory
from weft.api.server import HttpServer
from weft.backends import BaseEngine, registry, start_engine
from weft.backends.blocking import BlockingEngine
from weft.backends.contract import Engine, text_prompt
from weft.backends.native import start_native
from weft.backends.registry import BUILT_IN, EngineSpec
from weft.backends.vllm.arguments import ASCEND, CPU, CUDA_ASYNC, CUDA_SYNC, VllmKind, arguments_of
from weft.checkpoint.model_files import ModelFiles
from weft.config import load
from weft.errors import ConfigError, InvalidRequest
from weft.machine.planner import AUTO_DTYPE
from weft.options import CacheOptions, Config
from weft.types import FinishReason, Output, SamplingParams

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/backends.md").read_text()
COLUMNS = ["streaming", "batch", "LoRA", "quantisation", "abort", "seed", "logprobs", "stop"]
NOT_SHOWN = "not shown here"
OWN_CLASS = "a class of your own"
FILES = ModelFiles(name="tiny", kind="huggingface", path=Path("/models/tiny"), weight_files=[])
PROMPT = "The weft runs across"
NUM_ROWS = 4
"""How many requests the native engine computes together."""
LONG = 480
"""Tokens of an answer that nearly fills the context."""


def table_under(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, its own heading first."""
    section = re.split(rf"\n##+ {re.escape(heading)}\n", PAGE)[1].split("\n#", 1)[0]
    lines = re.findall(r"^\|(.+)\|$", section, re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines if not set(line) <= set("-|")]


def cells(mark: str) -> list[tuple[str, str]]:
    """Engine and column of every cell that begins so, whatever footnotes follow."""
    [_, *rows] = table_under("What each does")
    return [
        (engine, column)
        for engine, *row in rows
        for column, cell in zip(COLUMNS, row, strict=True)
        if re.fullmatch(f"{mark}[¹²³⁴⁵⁶⁷⁸⁹]*", cell)
    ]


SHOWN, SHOWN_WITH_VLLM, REFUSED, UNSHOWN = (cells(mark) for mark in ("✓", "✓ᵛ", "–", NOT_SHOWN))


def test_the_table_has_every_engine_and_no_other_marks() -> None:
    [heading, *rows] = table_under("What each does")
    assert heading == ["engine", *COLUMNS]
    assert {name.split(",")[0] for name, *_ in rows} == {*BUILT_IN, OWN_CLASS}
    assert len(SHOWN) + len(SHOWN_WITH_VLLM) + len(REFUSED) + len(UNSHOWN) == len(rows) * len(COLUMNS)
    assert {engine for engine, _ in SHOWN} >= {"native", "remote, tokens", "remote, text", "hybrid", OWN_CLASS}


def test_every_mark_has_its_footnote() -> None:
    marks = str.maketrans("¹²³⁴⁵⁶⁷⁸⁹", "123456789")
    used = {mark for row in table_under("What each does")[1:] for cell in row[1:] for mark in cell.translate(marks)}
    section = PAGE.split("\n## What each does\n", 1)[1].split("\n## ", 1)[0]
    assert used & set("123456789") == set(re.findall(r"^(\d)\. ", section, re.MULTILINE))


# The engines that run here. All but one have the same native engine behind them.


class Chorus(BaseEngine):
    """A class as others write it: it draws words by its seed, and ends at a stop string."""

    words = ("warp", "weft", "loom", "reed", "heddle", "shed", "pick", "sley", "beat", "cloth")

    def __init__(self) -> None:
        self.together = threading.Barrier(NUM_ROWS)
        self.left = threading.Event()

    def load_model(self, model_path: str, adapter_path: str | None = None, **kwargs: Any) -> None:
        pass

    def infer(self, prompt: str, **kwargs: Any) -> Generator[str, None, None]:
        drawn = random.Random(kwargs.get("seed"))
        if prompt == "together":
            self.together.wait()
        try:
            for number in range(kwargs.get("max_tokens", 4)):
                word = drawn.choice(self.words) if "seed" in kwargs else self.words[number % len(self.words)]
                if word in kwargs.get("stop", ()):
                    return
                yield f" {kwargs.get('lora_name', '')}{word}"
        finally:
            self.left.set()

    def unload_model(self) -> None:
        pass

    def get_memory_usage(self) -> dict[str, float]:
        return dict.fromkeys(("allocated_gb", "reserved_gb", "total_gb", "utilization"), 0.0)


class Answered(Struct, frozen=True):
    deltas: list[Output]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def scores(self) -> list[Any]:
        return [score for delta in self.deltas for score in delta.logprobs or ()]


class Stand(Struct, frozen=True, kw_only=True):
    """An engine that is asked, and the native one that computes, for what it counts."""

    engine: Engine
    native: Engine
    model: Path

    async def ask(self, prompt: str = PROMPT, adapter: str | None = None, **params: Any) -> Answered:
        asked = SamplingParams(**{"temperature": 0, "max_tokens": 24} | params)
        submitted = await self.engine.submit(sample(text_prompt(self.engine, prompt), asked, adapter=adapter))
        answered = Answered([delta async for delta in submitted])
        assert not answered.deltas[-1].error
        return answered


@asynccontextmanager
async def served(engine: Engine, config: Config) -> AsyncIterator[str]:
    """A Weft server over the engine, on the loop that the engine is on."""
    http = protocol_factory(config)
    app = build_app(engine, config)
    server = HttpServer(uvicorn.Config(app, http=http, port=0, log_config=None, lifespan="off", ws="none"))
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.end()
        await serving


@pytest.fixture(scope="module")
def model(tiny_gguf: Callable[[str, str], Path]) -> Path:
    return tiny_gguf("smollm2", "Q8_0")


@pytest.fixture(scope="module")
def native(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockingEngine]:
    adapter = save_adapter("smollm2", tmp_path_factory.mktemp("adapters") / "red")
    settings = {"num_blocks": 256, "max_num_seqs": NUM_ROWS, "threads": 1, "image_model": "none", "device": "cpu"}
    config = load({"model": str(model), "adapter": [f"red={adapter}"], **settings}, env={})
    with BlockingEngine(lambda: start_native(config)) as blocking:
        yield blocking


@pytest.fixture(scope="module")
def stands(native: BlockingEngine, model: Path) -> Iterator[dict[str, Stand]]:
    """Every engine of the table that runs here, by its row."""
    stack = AsyncExitStack()

    async def start() -> dict[str, Stand]:
        url = await stack.enter_async_context(served(native.engine, load(env={})))
        tokens = {"tokenizer": str(model), "max_model_len": 512}
        rows: dict[str, dict[str, Any]] = {
            "remote, tokens": {"engine": "remote", "engine_url": url, **tokens},
            "remote, text": {"engine": "remote", "engine_url": url},
            "hybrid": {"engine": "remote,native", "engine_url": url, **tokens},
            "cuda-trt": {"engine": "cuda-trt", "engine_url": url},
            "ascend-mindie": {"engine": "ascend-mindie", "engine_url": url},
            OWN_CLASS: {"engine": "chorus", "model": "any", "adapter": ["red=/loras/red"]},
        }
        engines = {"native": native.engine}
        for row, flags in rows.items():
            engines[row] = await start_engine(load(flags, env={}))
            stack.push_async_callback(engines[row].close)
        return {row: Stand(engine=engine, native=native.engine, model=model) for row, engine in engines.items()}

    with pytest.MonkeyPatch.context() as patch:
        chorus = EngineSpec(name="chorus", start=Chorus, platform="any", about="a test's", takes_adapters=True)
        patch.setattr(registry, "_registered", {"chorus": chorus})
        started = native.wait(start())
    yield started
    native.wait(stack.aclose())


# What shows each column.


async def streams(stand: Stand) -> None:
    answered = await stand.ask(max_tokens=200)
    *before, last = answered.deltas
    assert len(before) > 1 and last.finish is not None
    assert all(delta.finish is None for delta in before)
    assert answered.text == (await stand.ask(max_tokens=200)).text


async def batches(stand: Stand) -> None:
    prompts = ["together"] * NUM_ROWS if is_own_class(stand) else [f"{PROMPT} {i}" for i in range(NUM_ROWS)]
    # On a busy machine the first may be done before the last is sent: then they are sent once more.
    for _ in range(20):
        steps = stand.native.stats().steps
        answers = await asyncio.gather(*(stand.ask(prompt, max_tokens=64, **endless(stand)) for prompt in prompts))
        if is_own_class(stand):
            assert len({answered.text for answered in answers}) == 1, "all of them waited for each other"
            return
        if stand.native.stats().steps - steps < NUM_ROWS * 64 / 2:
            break
    else:
        raise AssertionError("there are never several rows in a step")
    for prompt, answered in zip(prompts, answers, strict=True):
        assert answered.text == (await stand.ask(prompt, max_tokens=64, **endless(stand))).text


async def adapts(stand: Stand) -> None:
    plain, red = await stand.ask(), await stand.ask(adapter="red")
    assert red.text != plain.text == (await stand.ask()).text


async def quantises(stand: Stand) -> None:
    """The weights that are served are quantised: those of the file. The native engine quantises on GPUs alone."""
    types = {tensor.tensor_type for tensor in GGUFReader(stand.model).tensors}
    assert GGMLQuantizationType.Q8_0 in types
    answered = await stand.ask()
    assert answered.text == (await Stand(engine=stand.native, native=stand.native, model=stand.model).ask()).text
    with pytest.raises(ConfigError, match="multiply FP8"):
        await start_native(load({"model": str(stand.model), "quantization": "fp8"}, env={}))


async def aborts(stand: Stand) -> None:
    """Many more than run at once are left when the first has begun: those that wait never run."""
    num_requests = 8 * NUM_ROWS
    begun = asyncio.Event()
    tokens = stand.native.stats().generation_tokens

    async def read() -> None:
        params = SamplingParams(max_tokens=LONG, temperature=0, **endless(stand))
        async with aclosing(await stand.engine.submit(sample(text_prompt(stand.engine, PROMPT), params))) as deltas:
            async for _ in deltas:
                begun.set()

    if is_own_class(stand):
        stand.engine.inner.left.clear()  # type: ignore[attr-defined]
        num_requests = 1
    reading = [asyncio.create_task(read()) for _ in range(num_requests)]
    await begun.wait()
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    if is_own_class(stand):
        await until(stand.engine.inner.left.is_set)  # type: ignore[attr-defined]
        return
    await until(lambda: stand.native.stats().running == stand.native.stats().waiting == 0)
    assert stand.native.stats().generation_tokens - tokens < num_requests * LONG / 2


async def repeats(stand: Stand) -> None:
    drawn = [(await stand.ask(temperature=1.0, seed=seed)).text for seed in (5, 5, 6)]
    assert drawn[0] == drawn[1] != drawn[2]


async def scores(stand: Stand) -> None:
    mine = await stand.ask(logprobs=2, **endless(stand))
    theirs = await Stand(engine=stand.native, native=stand.native, model=stand.model).ask(logprobs=2, ignore_eos=True)
    assert len(mine.scores) == len(theirs.scores) == 24
    for score, other in zip(mine.scores, theirs.scores, strict=True):
        assert score.logprob == pytest.approx(other.logprob, abs=1e-5) and score.logprob < 0
        assert [token for token, _ in score.top] == [token for token, _ in other.top] and len(score.top) == 2


async def stops(stand: Stand) -> None:
    plain = await stand.ask(max_tokens=60, **endless(stand))
    if is_own_class(stand):
        assert (await stand.ask(max_tokens=60, stop=("reed",))).text == plain.text[: plain.text.index(" reed")]
        return
    text = plain.text
    stop = next(text[i : i + 2] for i in range(8, len(text)) if text[i : i + 2].isascii() and text[i : i + 2].strip())
    cut = await stand.ask(max_tokens=60, stop=(stop,), **endless(stand))
    assert cut.text == text[: text.index(stop)]
    assert (cut.deltas[-1].finish, cut.deltas[-1].stop_reason) == (FinishReason.STOP, stop)
    biased = await stand.ask(max_tokens=60, logit_bias={70: 100.0}, stop_token_ids=(70,), **endless(stand))
    assert biased.deltas[-1].finish is FinishReason.STOP and biased.deltas[-1].usage.completion_tokens == 1


def is_own_class(stand: Stand) -> bool:
    return stand.engine.name == "chorus"


def endless(stand: Stand) -> dict[str, Any]:
    """What keeps an answer going to its limit; a class of one's own is not told of it."""
    return {} if is_own_class(stand) else {"ignore_eos": True}


SHOWS: dict[str, Callable[[Stand], Awaitable[None]]] = {
    "streaming": streams,
    "batch": batches,
    "LoRA": adapts,
    "quantisation": quantises,
    "abort": aborts,
    "seed": repeats,
    "logprobs": scores,
    "stop": stops,
}
ASKS_FOR: dict[str, dict[str, Any]] = {"LoRA": {"adapter": "red"}, "logprobs": {"logprobs": 1}}
"""What asks for a column, for engines that refuse it."""


@pytest.mark.parametrize(("engine", "column"), SHOWN)
def test_what_is_marked_as_shown_is_shown(
    native: BlockingEngine, stands: dict[str, Stand], engine: str, column: str
) -> None:
    async def case() -> None:
        async with asyncio.timeout(PATIENCE):
            await SHOWS[column](stands[engine])

    native.wait(case())


@pytest.mark.parametrize(("engine", "column"), REFUSED)
def test_what_is_marked_as_refused_is_refused_by_the_engines_name(
    native: BlockingEngine, stands: dict[str, Stand], engine: str, column: str
) -> None:
    stand = stands[engine]
    with pytest.raises(InvalidRequest, match=f"engine {stand.engine.name}"):
        native.wait(stand.ask(**ASKS_FOR[column]))


@pytest.mark.parametrize(("engine", "column"), SHOWN_WITH_VLLM)
def test_what_is_shown_with_vllm_has_its_test(engine: str, column: str) -> None:
    """One that is marked as needing vLLM, and so is run wherever vLLM is."""
    [heading, *rows] = table_under("Tests with vLLM")
    [row] = [row for row in rows if row[0] == column]
    place = heading.index(f"`{engine}`")
    # A row may name a file of its own.
    [file] = re.findall(r"`(tests/\S+\.py)", row[place]) or re.findall(r"`(tests/\S+\.py)`", rows[0][place])
    [name] = re.findall(r"(?:`|::)(test_\w+)`", row[place])
    body = ast.parse((ROOT / file).read_text()).body
    assert name in {node.name for node in body if isinstance(node, ast.FunctionDef)}
    marks = [
        node.value.id for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "pytestmark"
    ]
    assert marks in (["needs_vllm"], ["needs_any_vllm"])


@pytest.mark.parametrize("kind", [CUDA_ASYNC, CUDA_SYNC, CPU, ASCEND])
def test_defaults_are_equal_whichever_engine_computes(kind: VllmKind) -> None:
    """What the native engine takes from the configuration and its tables, vLLM is given in its arguments."""
    config = load({"engine": kind.name}, env={})
    assert config.cache == CacheOptions(gpu_memory_utilization=0.75, enable_prefix_caching=True)
    given = arguments_of(config, FILES, kind)
    assert given["enable_prefix_caching"] is True and given["trust_remote_code"] is False
    assert given.get("gpu_memory_utilization") == (None if kind is CPU else 0.75)
    assert given["dtype"] == AUTO_DTYPE[kind.place]
    assert (given["max_num_seqs"], given["max_num_batched_tokens"]) == ((32, 2048) if kind is CPU else (256, 8192))


@pytest.mark.parametrize("number", range(1, 11))
def test_the_test_cases_are_where_the_page_says(number: int) -> None:
    rows = {row[0]: row for row in table_under("The ten test cases")[1:]}
    case = f"TC-{number:03}"
    ours, theirs = (re.findall(r"`(\S+\.py)`", cell) for cell in rows[case][2:])
    assert ours and theirs
    for file in (*ours, *(f"tests/backends/vllm/{name}" for name in theirs)):
        named = re.search(rf"def test_\w*{case.lower().replace('-', '_')}_", (ROOT / file).read_text())
        assert named, f"{file} has no test of {case}"
