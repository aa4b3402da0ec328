"""The contract for callers that wait, kept by Weft's own engine with the default model. TC numbers are those of the
requirements."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import threading
import types
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.processes import descendants
from tests.waiting import PATIENCE, wait_until
from weft.backends import BaseEngine, InferMetrics, create_engine
from weft.backends.contract import Engine
from weft.checkpoint.model_files import ModelFiles
from weft.compat.hosted import HostedEngine
from weft.engine.process import expect_launch
from weft.engine.wire import StepOutput
from weft.errors import ContextTooLong, InvalidRequest, Unavailable
from weft.types import FinishReason

SETTINGS = {"kv_cache_memory_mb": 128, "max_model_len": 1024, "image_model": "none"}
PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8, "repetition_penalty": 1}
ENDLESS: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}


def behind(engine: HostedEngine) -> Engine:
    assert engine._blocking is not None
    return engine._blocking.engine


@pytest.fixture(scope="module")
def engine(smollm2_files: ModelFiles) -> Iterator[HostedEngine]:
    engine = create_engine("native", **SETTINGS)
    assert isinstance(engine, HostedEngine)
    engine.load_model("smollm2")
    yield engine
    engine.unload_model()


@pytest.fixture(scope="module")
def text(engine: BaseEngine) -> str:
    return "".join(engine.infer(PROMPT, **GREEDY))


def children() -> dict[int, int]:
    """The processes that this one has started, and what they hold, in bytes."""
    found = {}
    for pid in descendants(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[pid] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return found


@contextmanager
def held_back(engine: HostedEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Of what the engine process sends, only the first step with tokens arrives before the given function is called,
    from whichever thread."""
    client: Any = behind(engine).client  # type: ignore[attr-defined]
    blocking = engine._blocking
    assert blocking is not None
    deliver = client._deliver
    held: list[StepOutput] = []
    num_steps, is_open = 0, False

    def hold(output: StepOutput) -> None:
        nonlocal num_steps
        num_steps += bool(output.tokens or output.events)
        if is_open or num_steps <= 1:
            deliver(output)
        else:
            held.append(output)

    def let_through() -> None:
        nonlocal is_open
        is_open = True
        for output in held:
            deliver(output)

    def go_on() -> None:
        blocking._loop.call_soon_threadsafe(let_through)

    with monkeypatch.context() as patch:
        patch.setattr(client, "_deliver", hold)
        yield go_on


def test_tc_001_tc_002_it_streams_text_as_tokens_come(
    engine: HostedEngine, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_back(engine, monkeypatch) as go_on:
        chunks = engine.infer(PROMPT, **GREEDY | {"max_new_tokens": 32, "ignore_eos": True})
        assert isinstance(chunks, types.GeneratorType)
        first = next(chunks)
        assert behind(engine).stats().open_requests == 1, "the first piece did not wait for the last"
        go_on()
        rest = list(chunks)
    assert "Paris" in text and (first + "".join(rest)).startswith(text)
    assert len(rest) > 20, "a token at a time"
    metrics = engine.last_metrics
    assert metrics is not None and metrics.finish is FinishReason.LENGTH
    assert metrics.completion_tokens == 32 and metrics.prompt_tokens == 5
    assert (
        metrics.queue_seconds is not None
        and 0 <= metrics.queue_seconds < metrics.ttft_seconds < metrics.generation_seconds
    )
    assert metrics.tokens_per_second == pytest.approx(32 / metrics.generation_seconds)


@pytest.mark.parametrize(("size", "num_pieces"), [(1, 8), (3, 4), (0, 8), (100, 2)])
def test_tc_003_the_size_of_pieces_takes_effect(engine: HostedEngine, text: str, size: int, num_pieces: int) -> None:
    """The first token comes alone, then so many at a time, then the rest: 1 + 3 + 3 + 1."""
    engine.stream_chunk_size = size
    chunks = list(engine.infer(PROMPT, **GREEDY))
    assert "".join(chunks) == text and len(chunks) == num_pieces
    engine.stream_chunk_size = 1


def test_tc_007_many_threads_and_tasks_at_once(engine: HostedEngine, text: str) -> None:
    with ThreadPoolExecutor(16) as pool:
        streamed = [pool.submit(lambda: "".join(engine.infer(PROMPT, **GREEDY))) for _ in range(16)]
        batch = pool.submit(engine.infer_batch, [PROMPT] * 8, **GREEDY)
        assert [future.result() for future in streamed] == [text] * 16
        assert batch.result() == [text] * 8

    async def one() -> str:
        return "".join([chunk async for chunk in engine.async_infer(PROMPT, **GREEDY)])

    async def scenario() -> list[str]:
        return list(await asyncio.gather(*(one() for _ in range(8))))

    assert asyncio.run(scenario()) == [text] * 8
    assert behind(engine).stats().open_requests == 0


def test_tc_009_where_an_engine_cannot_be_the_next_one_answers(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = create_engine("ascend-vllm,cuda-trt,native", image_model="none", num_blocks=32, threads=1)
    engine.load_model(str(tiny_model))
    try:
        assert list(engine.infer("hi", max_tokens=4, ignore_eos=True)) and engine.get_model_info()["engine"] == "native"
    finally:
        engine.unload_model()
    [said] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "no Ascend device" in said and "--engine-url" in said


def test_tc_010_memory_is_really_given_back(smollm2_files: ModelFiles) -> None:
    expect_launch()  # what engines are forked from stays
    before = set(children())
    engine = create_engine("native", **SETTINGS)
    engine.load_model("smollm2")
    loaded = engine.get_memory_usage()
    list(engine.infer("one " * 300, **GREEDY | {"max_new_tokens": 1}))
    # The pages of the cache come to be used as tokens are computed: 45 KiB each.
    more_gb = loaded["allocated_gb"] + 0.01
    wait_until(lambda: engine.get_memory_usage()["allocated_gb"] > more_gb, "more memory")
    held = {pid: size for pid, size in children().items() if pid not in before}
    usage = engine.get_memory_usage()
    assert 0.2 < usage["allocated_gb"] < usage["total_gb"] and 0 < usage["utilization"] < 1
    assert usage["allocated_gb"] <= usage["reserved_gb"]
    assert max(held.values()) > 0.9 * usage["allocated_gb"] * 2**30, "by the engine's process"
    engine.unload_model()
    assert not set(held) & set(children()), "no process is left, and so nothing that it held"
    assert set(engine.get_memory_usage().values()) == {0.0}
    with pytest.raises(Unavailable, match="No model is loaded"):
        engine.infer(PROMPT)


def test_inside_a_running_loop_it_waits_for_nobody_but_the_engine(
    engine: HostedEngine, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        # Blocking, on the loop's own thread: all that answers it runs elsewhere.
        assert "".join(engine.infer(PROMPT, **GREEDY)) == text
        assert engine.infer_batch([PROMPT], **GREEDY) == [text]
        # Read asynchronously, it leaves the loop to others: the rest comes only after some turns of another task.
        with held_back(engine, monkeypatch) as go_on:
            chunks = engine.async_infer(PROMPT, **GREEDY)
            first = await anext(chunks)

            async def turn() -> None:
                for _ in range(5):
                    await asyncio.sleep(0)
                go_on()

            turning = asyncio.create_task(turn())
            assert first + "".join([chunk async for chunk in chunks]) == text
            await turning

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


def test_nested_in_each_other(engine: HostedEngine, text: str) -> None:
    """A generator in a generator, an answer in the callback of another, a loop in a thread of a loop."""
    nested: list[str] = []

    def ask_again(metrics: InferMetrics) -> None:
        nested.append("".join(engine.infer(PROMPT, **GREEDY)))

    outer = []
    for number, chunk in enumerate(engine.infer(PROMPT, **GREEDY, on_metrics=ask_again)):
        outer.append(chunk)
        if number < 2:
            nested.append("".join(engine.infer(PROMPT, **GREEDY)))

    async def inner() -> str:
        return "".join([chunk async for chunk in engine.async_infer(PROMPT, **GREEDY)])

    async def scenario() -> None:
        async for _ in engine.async_infer(PROMPT, **GREEDY):
            nested.append("".join(engine.infer(PROMPT, **GREEDY)))
            nested.append(await asyncio.to_thread(lambda: asyncio.run(inner())))
            break

    asyncio.run(scenario())
    assert "".join(outer) == text and nested == [text] * 5
    until_idle(engine)


class Handler(grpc.GenericRpcHandler):
    """/blocking answers with `infer` on the server's own thread, /streaming with `async_infer`."""

    def __init__(self, engine: BaseEngine) -> None:
        self._engine = engine

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        method = self._blocking if details.method == "/test/blocking" else self._streaming
        return grpc.unary_stream_rpc_method_handler(method)

    async def _blocking(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for chunk in self._engine.infer(request.decode(), **GREEDY):
            yield chunk.encode()

    async def _streaming(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        async for chunk in self._engine.async_infer(request.decode(), **GREEDY):
            yield chunk.encode()


def test_under_grpc_s_own_event_loop(engine: HostedEngine, text: str) -> None:
    async def scenario() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers([Handler(engine)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

            async def call(method: str) -> str:
                chunks = [chunk async for chunk in channel.unary_stream(method)(PROMPT.encode())]
                return b"".join(chunks).decode()

            for method in ("/test/blocking", "/test/streaming"):
                assert await asyncio.gather(*(call(method) for _ in range(4))) == [text] * 4
            leaving = channel.unary_stream("/test/streaming")(PROMPT.encode())
            await anext(aiter(leaving))
            leaving.cancel()
        await server.stop(None)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))
    until_idle(engine)


def until_idle(engine: HostedEngine) -> None:
    wait_until(lambda: not behind(engine).stats().open_requests, "the end of a request that nobody reads")


def leave_by_break(engine: HostedEngine) -> None:
    for _ in engine.infer(PROMPT, **ENDLESS):
        break


def leave_by_close(engine: HostedEngine) -> None:
    chunks = engine.infer(PROMPT, **ENDLESS)
    next(chunks)
    chunks.close()


def leave_to_be_collected(engine: HostedEngine) -> None:
    next(engine.infer(PROMPT, **ENDLESS))
    gc.collect()


def leave_by_an_error(engine: HostedEngine) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in engine.infer(PROMPT, **ENDLESS):
            raise ZeroDivisionError


def leave_a_task(engine: HostedEngine) -> None:
    async def scenario() -> None:
        async def read() -> None:
            async for _ in engine.async_infer(PROMPT, **ENDLESS):
                reading.set()

        reading = asyncio.Event()
        task = asyncio.create_task(read())
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


def leave_by_abort(engine: HostedEngine) -> None:
    chunks = engine.infer(PROMPT, **ENDLESS, request_id="mine")
    next(chunks)
    aborting = threading.Thread(target=engine.abort, args=["mine"])
    aborting.start()
    assert len(list(chunks)) < 899
    aborting.join(PATIENCE)


@pytest.mark.parametrize(
    "leave",
    [leave_by_break, leave_by_close, leave_to_be_collected, leave_by_an_error, leave_a_task, leave_by_abort],
)
def test_leaving_early_ends_the_request(engine: HostedEngine, leave: Callable[[HostedEngine], None]) -> None:
    generated = behind(engine).stats().generation_tokens
    leave(engine)
    until_idle(engine)
    assert behind(engine).stats().generation_tokens - generated < 900
    assert engine.last_metrics is not None and engine.last_metrics.finish is FinishReason.ABORT


def test_what_cannot_be_answered_is_refused_before_the_engine(engine: HostedEngine) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        engine.infer("")
    with pytest.raises(ContextTooLong, match="1024"):
        engine.infer("word " * 2000)
    with pytest.raises(InvalidRequest, match="no adapter"):
        engine.infer(PROMPT, lora_name="mine")
    assert behind(engine).stats().open_requests == 0


def test_a_seed_is_a_promise(engine: HostedEngine) -> None:
    words = {"temperature": 1.0, "seed": 9, "max_tokens": 12}
    first = list(engine.infer(PROMPT, **words))
    assert list(engine.infer(PROMPT, **words)) == first
    assert engine.infer_batch([PROMPT], **words) == ["".join(first)]


def test_check_only_loads_nothing(smollm2_files: ModelFiles) -> None:
    before = set(children())
    engine = create_engine("native", **SETTINGS)
    engine.load_model("smollm2", load_mode="check_only")
    assert not engine.health_check() and not engine.get_model_info()["is_loaded"]
    assert set(children()) <= before
