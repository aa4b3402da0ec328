"""An engine that another package wrote for callers that wait, behind the contract that the API knows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.generation import embed, generate_image, sample
from tests.waiting import PATIENCE
from weft import LLM
from weft.backends import BaseEngine, InferMetrics, start_engine
from weft.backends.contract import NotSupported
from weft.backends.rechunk import split_words
from weft.compat.adapted import AdaptedEngine
from weft.config import load
from weft.errors import InvalidRequest, OutOfMemory
from weft.types import Conversation, FinishReason, ImageParams, ResetPrefixCache, SamplingParams, Usage


class Parrot(BaseEngine):
    """The least that an engine must be: says the prompt twice."""

    loaded = ""

    def load_model(self, model_path: str, adapter_path: str | None = None, **kwargs: Any) -> None:
        if model_path == "a cage":
            raise FileNotFoundError("no such bird")
        self.loaded = model_path
        self.told = {"adapter_path": adapter_path, **kwargs}
        self.words: list[dict[str, Any]] = []
        self.left = threading.Event()

    def infer(self, prompt: str, **kwargs: Any) -> Generator[str, None, None]:
        self.words.append(kwargs)
        try:
            yield prompt
            if prompt == "fall silent":
                raise RuntimeError("nothing more comes to mind")
            yield " "
            yield prompt
        finally:
            self.left.set()

    def unload_model(self) -> None:
        self.loaded = ""

    def get_memory_usage(self) -> dict[str, float]:
        return {"allocated_gb": 0.0, "reserved_gb": 0.0, "total_gb": 1.0, "utilization": 0.0}

    def get_model_info(self) -> dict[str, Any]:
        return {"is_loaded": bool(self.loaded), "engine": "parrot", "name": self.loaded}


@asynccontextmanager
async def serving(
    add_engine: Callable[..., None], kind: type[Parrot] = Parrot, name: str = "parrot", **settings: Any
) -> AsyncIterator[AdaptedEngine]:
    add_engine(name, kind, takes_adapters=True)
    engine = await start_engine(load({"engine": name, "model": "some/bird", **settings}, env={}))
    assert isinstance(engine, AdaptedEngine)
    try:
        yield engine
    finally:
        await engine.close()


def test_what_the_class_has_to_write_is_enough_for_callers_that_wait() -> None:
    parrot = Parrot()
    assert not parrot.health_check() and not parrot.is_async and parrot.stream_chunk_size == 0
    parrot.load_model("some/bird")
    assert parrot.health_check()
    assert parrot.infer_batch(["a", "b"]) == ["a a", "b b"]
    assert parrot.abort("x") is False

    async def scenario() -> None:
        assert [chunk async for chunk in parrot.async_infer("a")] == ["a", " ", "a"]
        parrot.left.clear()
        chunks = parrot.async_infer("a")
        assert await anext(chunks) == "a"
        await chunks.aclose()
        assert parrot.left.is_set()

    asyncio.run(scenario())


def test_the_api_can_serve_it(add_engine: Callable[..., None]) -> None:
    async def scenario() -> None:
        async with serving(add_engine) as engine:
            params = SamplingParams(max_tokens=5, temperature=0, top_p=1.0)
            deltas = [delta async for delta in await engine.submit(sample("hi", params))]
            assert "".join(delta.text for delta in deltas) == "hi hi"
            assert [delta.finish for delta in deltas if delta.finish] == [FinishReason.STOP]
            [words] = engine.inner.words  # type: ignore[attr-defined]
            assert words.pop("request_id") and words == {"max_tokens": 5, "temperature": 0}
            assert engine.health().ready and engine.model.name == "some/bird" and engine.name == "parrot"
            answer = await engine.submit(sample("hi", params))
            await anext(answer)
            assert engine.stats().open_requests == 1
            await answer.aclose()
            assert engine.stats().open_requests == 0 and engine.inner.left.is_set()  # type: ignore[attr-defined]
        assert not engine.health().ready

    asyncio.run(scenario())


def test_a_reader_that_is_cancelled_hears_so_and_the_generator_is_closed(add_engine: Callable[..., None]) -> None:
    """While a thread is in the midst of a chunk."""

    class Slow(Parrot):
        def __init__(self) -> None:
            self.begun, self.may_go_on, self.left = threading.Event(), threading.Event(), threading.Event()

        def load_model(self, model_path: str, adapter_path: str | None = None, **kwargs: Any) -> None:
            self.loaded = model_path

        def infer(self, prompt: str, **kwargs: Any) -> Generator[str, None, None]:
            try:
                self.begun.set()
                assert self.may_go_on.wait(PATIENCE)
                yield prompt
                raise AssertionError("a chunk too many")
            finally:
                self.left.set()

    async def cancelled(slow: Slow, reading: Awaitable[object]) -> None:
        reader = asyncio.ensure_future(reading)
        await asyncio.to_thread(slow.begun.wait)
        reader.cancel()
        await asyncio.sleep(0)
        slow.may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert slow.left.is_set()

    async def scenario() -> None:
        slow = Slow()
        await cancelled(slow, anext(slow.async_infer("a")))
        add_engine("slow", Slow)
        engine = await start_engine(load({"engine": "slow", "model": "some/bird"}, env={}))
        assert isinstance(engine, AdaptedEngine) and isinstance(engine.inner, Slow)
        answer = await engine.submit(sample("a", SamplingParams()))
        await cancelled(engine.inner, anext(answer))
        assert engine.stats().open_requests == 0
        await answer.aclose()
        await engine.close()

    asyncio.run(scenario())


class Measured(Parrot):
    """Tells the figures of its requests."""

    def infer(self, prompt: str, **kwargs: Any) -> Generator[str, None, None]:
        yield from super().infer(prompt, **kwargs)
        of_whom = "another" if prompt == "interrupted" else kwargs["request_id"]
        self.last_metrics = InferMetrics(
            request_id=of_whom,
            finish=FinishReason.LENGTH,
            prompt_tokens=7,
            completion_tokens=9,
            queue_seconds=0.25,
        )


def test_its_load_is_told_what_was_set(add_engine: Callable[..., None]) -> None:
    async def scenario() -> None:
        async with serving(add_engine) as engine:
            assert engine.inner.told == {"adapter_path": None}  # type: ignore[attr-defined]
        settings = {"max_model_len": 7, "gpu_memory_utilization": 0.3, "port": 1, "max_num_seqs": 0}
        adapters = ["/loras/plain", "legal=/loras/legal"]
        async with serving(add_engine, name="second", adapter=adapters, quantization="fp8", **settings) as engine:
            assert engine.inner.told == {  # type: ignore[attr-defined]
                "adapter_path": "/loras/plain",
                "adapters": {"legal": "/loras/legal"},
                "max_model_len": 7,
                "gpu_memory_utilization": 0.3,
                "quantization": "fp8",
            }
            assert engine.abilities.lora
            for adapter in (None, "", "legal"):
                await anext(await engine.submit(sample("hi", SamplingParams(), request_id="mine", adapter=adapter)))
            assert engine.inner.words == [  # type: ignore[attr-defined]
                {"request_id": "mine"},
                {"request_id": "mine", "lora_name": ""},
                {"request_id": "mine", "lora_name": "legal"},
            ]
            with pytest.raises(InvalidRequest, match=r"no adapter 'other'.*default, legal"):
                await engine.submit(sample("hi", SamplingParams(), adapter="other"))

    asyncio.run(scenario())


def test_a_load_without_memory_is_tried_with_less_and_not_with_the_same(add_engine: Callable[..., None]) -> None:
    tries: list[dict[str, Any]] = []

    class Fat(Parrot):
        def load_model(self, model_path: str, adapter_path: str | None = None, **kwargs: Any) -> None:
            tries.append(kwargs)
            raise MemoryError("no room")

    add_engine("fat", Fat)
    with pytest.raises(OutOfMemory):
        asyncio.run(start_engine(load({"engine": "fat", "model": "some/bird"}, env={})))
    assert tries[0] == {} and tries[1] == {"max_model_len": 8192} and tries[-1]["max_num_seqs"] == 32
    assert all(tries.count(one) == 1 for one in tries)


def test_its_own_figures_are_told_and_words_where_it_has_none(
    add_engine: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serving(add_engine, Measured, "measured") as engine:
            *_, last = [delta async for delta in await engine.submit(sample("hi you", SamplingParams()))]
            assert last.usage == Usage(prompt_tokens=7, completion_tokens=9)
            assert (last.finish, last.queue_seconds) == (FinishReason.LENGTH, 0.25)
            *_, last = [delta async for delta in await engine.submit(sample("interrupted", SamplingParams()))]
            assert last.usage == Usage(prompt_tokens=1, completion_tokens=3), "its figures were another's"
            assert not caplog.records
        async with serving(add_engine) as engine:
            for _ in range(2):
                deltas = [delta async for delta in await engine.submit(sample("hi you", SamplingParams()))]
                assert [delta.usage.completion_tokens for delta in deltas] == [2, 3, 5, 5]
                assert deltas[-1].usage.prompt_tokens == 2 and deltas[-1].queue_seconds is None
        [warning] = [record.getMessage() for record in caplog.records]
        assert "parrot leaves no last_metrics" in warning

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("text", "num_words"),
    [("", 0), ("one", 1), (" one  two\n", 3), ("天气很好, yes", 6), ("今日はgoodです", 6), ("\n\n", 1)],
)
def test_words_are_counted_and_joined_they_are_the_text(text: str, num_words: int) -> None:
    words = split_words(text)
    assert "".join(words) == text and len(words) == num_words


def test_the_python_api_can_use_it(add_engine: Callable[..., None]) -> None:
    add_engine("parrot", Parrot)
    with LLM("some/bird", engine="parrot") as llm:
        assert [answer.text for answer in llm.generate(["a", "b"])] == ["a a", "b b"]
        assert [delta.text for delta in llm.stream("a")] == ["a", " ", "a", ""]


def test_what_it_cannot_is_refused(add_engine: Callable[..., None]) -> None:
    image = ImageParams(width=4, height=4, steps=1, guidance_scale=1.0, seed=0)

    async def scenario() -> None:
        async with serving(add_engine) as engine:
            for prompt, params, why in (
                ("hi", SamplingParams(logprobs=1), "logprobs"),
                ("hi", SamplingParams(min_p=0.5), "min_p"),
                ("hi", SamplingParams(temperature=-1), "temperature"),
                ("", SamplingParams(), "empty"),
                ([1, 2], SamplingParams(), "takes text"),
                (Conversation(messages=[]), SamplingParams(), "takes text"),
            ):
                with pytest.raises(InvalidRequest, match=why) as refusal:
                    await engine.submit(sample(prompt, params))  # type: ignore[arg-type]
                assert "--tokenizer" not in str(refusal.value), "it never reads that"
            with pytest.raises(InvalidRequest, match=r"does not know them\.$"):
                _ = engine.text.tokenizer
            with pytest.raises(InvalidRequest, match="does not know them"):
                engine.text.encode_chat([])
            for work in (
                engine.submit(embed("hi")),
                engine.submit(generate_image([1], image)),
                engine.control(ResetPrefixCache()),
            ):
                with pytest.raises(NotSupported, match="parrot cannot"):
                    await work
            assert not engine.inner.words  # type: ignore[attr-defined]

    asyncio.run(scenario())


def test_its_errors_end_one_request_and_its_load_is_refused(add_engine: Callable[..., None]) -> None:
    async def scenario() -> None:
        async with serving(add_engine) as engine:
            deltas = [delta async for delta in await engine.submit(sample("fall silent", SamplingParams()))]
            assert deltas[-1].finish is FinishReason.ERROR
            assert deltas[-1].error == "RuntimeError: nothing more comes to mind"
            assert engine.stats().open_requests == 0
        with pytest.raises(FileNotFoundError, match="no such bird"):
            await start_engine(load({"engine": "parrot", "model": "a cage"}, env={}))

    asyncio.run(scenario())


def test_one_that_cannot_tell_how_it_is_is_not_well(add_engine: Callable[..., None]) -> None:
    class Dazed(Parrot):
        def health_check(self) -> bool:
            raise RuntimeError("where am I?")

    async def scenario() -> None:
        async with serving(add_engine, Dazed, "dazed") as engine:
            health = engine.health()
            assert not health.ready and health.reason == "failed"

    asyncio.run(scenario())
