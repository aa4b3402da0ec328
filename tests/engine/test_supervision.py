"""The engine process is disposable: killed, hung or broken, it is replaced and every stream goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
from msgspec.structs import replace

from tests.engine.faulty import POISON
from tests.generation import generate_image, sample
from tests.processes import descendants
from tests.tiny_images import SIZE, save_image_model
from tests.waiting import until, wait_until
from weft.backends.native import NativeEngine, NativeStream, start_native
from weft.checkpoint.model_files import ModelFiles
from weft.config import load
from weft.engine import client
from weft.engine.client import EngineClient
from weft.engine.process import EngineProcess, EngineThread, launch_engine
from weft.engine.wire import FromEngine, Started, StepOutput
from weft.engine_stats import EngineStats
from weft.errors import EngineFault, ModelError, OutOfMemory, Overloaded
from weft.hub.resolve import resolve
from weft.types import FinishReason, ImageParams, Output, SamplingParams

MAX_TOKENS = 30
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=MAX_TOKENS, ignore_eos=True)
LONG, LONG_SEEDED = (replace(params, max_tokens=100) for params in (GREEDY, SEEDED))
LONGEST = replace(GREEDY, max_tokens=150)
"""For the tiny model, which is quick."""
PROMPTS = [
    "The sea was calm that morning, and",
    "def quicksort(items):",
    "请介绍一下人工智能的历史。",
    "Once upon a time",
]


@pytest.fixture
def tiny_files(tiny_model: Path) -> ModelFiles:
    return resolve(str(tiny_model))


@asynccontextmanager
async def serving(files: ModelFiles, launch=launch_engine, **settings: object) -> AsyncIterator[NativeEngine]:
    config = load({"kv_cache_memory_mb": 256, "max_model_len": 512, **settings}, env={})
    engine = await start_native(config, files, launch=launch)
    try:
        yield engine
    finally:
        await engine.close()


async def answer(engine: NativeEngine, prompt: str | list[int], params: SamplingParams) -> tuple[str, Output]:
    tokens = engine.text.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    text = ""
    async for output in await engine.submit(sample(tokens, params)):
        text += output.text
    return text, output


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return b"\nState:\tZ" not in Path(f"/proc/{pid}/status").read_bytes()


def test_killed_in_mid_stream_every_stream_goes_on(tiny_files: ModelFiles) -> None:
    async def scenario() -> None:
        async with serving(tiny_files) as engine:
            work = [(prompt, params) for prompt in PROMPTS for params in (LONG, LONG_SEEDED)]
            undisturbed = [text for text, _ in await asyncio.gather(*(answer(engine, *one) for one in work))]
            first_pid = engine.client.engine_pid
            streams = [asyncio.create_task(answer(engine, *one)) for one in work]
            generated = engine.stats().generation_tokens
            await until(lambda: engine.stats().generation_tokens > generated + 40)
            os.kill(first_pid, signal.SIGKILL)
            await until(lambda: not engine.health().ready)
            assert engine.health().reason == "restarting"
            disturbed = await asyncio.gather(*streams)
            assert [text for text, _ in disturbed] == undisturbed
            assert all(last.finish is FinishReason.LENGTH for _, last in disturbed)
            assert all(last.usage.completion_tokens == LONG.max_tokens for _, last in disturbed)
            assert engine.stats().restarts == 1
            await until(lambda: engine.health().ready)
            assert not alive(first_pid)

    asyncio.run(scenario())


def test_a_request_that_comes_as_the_engine_dies_is_answered_by_the_next(tiny_files: ModelFiles) -> None:
    """One comes in every turn of the server's event loop, also in those in which the connection is closed and its end
    is not noticed yet: to write to it is an error of uvloop."""

    async def scenario() -> None:
        async with serving(tiny_files) as engine:
            tokens = engine.text.tokenizer.encode(PROMPTS[0])
            undisturbed, _ = await answer(engine, tokens, GREEDY)
            os.kill(engine.client.engine_pid, signal.SIGKILL)
            streams: deque[NativeStream] = deque()
            while engine.client.state == "ready":
                streams.append(await engine.submit(sample(tokens, GREEDY)))
                if len(streams) > 4:
                    # The loop may turn more often than the queue has places.
                    await streams.popleft().aclose()
                await asyncio.sleep(0)
            for stream in streams:
                assert "".join([output.text async for output in stream]) == undisturbed

    uvloop.run(scenario())


def test_killed_with_a_draft_model_every_stream_goes_on(tiny_files: ModelFiles) -> None:
    """The new engine has a draft model again; usage counts what either engine has drafted."""
    files, settings = replace(tiny_files, draft=tiny_files), {"speculative_model": str(tiny_files.path)}

    async def scenario() -> None:
        async with serving(files, **settings) as engine:
            work = [(prompt, params) for prompt in PROMPTS for params in (LONG, LONG_SEEDED)]
            plain = [(prompt, replace(params, speculative=False)) for prompt, params in work]
            undisturbed = [text for text, _ in await asyncio.gather(*(answer(engine, *one) for one in plain))]
            assert engine.stats().draft_tokens == 0
            streams = [asyncio.create_task(answer(engine, *one)) for one in work]
            await until(lambda: engine.stats().accepted_tokens > 10)
            os.kill(engine.client.engine_pid, signal.SIGKILL)
            disturbed = await asyncio.gather(*streams)
            assert [text for text, _ in disturbed] == undisturbed
            assert engine.stats().restarts == 1
            for _, last in disturbed:
                assert 20 < last.usage.accepted_tokens == last.usage.draft_tokens < last.usage.completion_tokens

    asyncio.run(scenario())


def test_killed_in_mid_image_it_is_drawn_again_and_is_the_same(tiny_files: ModelFiles, tmp_path: Path) -> None:
    """Beside a chat. No step is told twice, and none is left out."""
    image = ImageParams(
        width=SIZE, height=SIZE, steps=100, guidance_scale=2.0, seed=5, preview_every=40, negative_token_ids=[9, 8]
    )

    async def scenario() -> None:
        async with serving(tiny_files, image_model=str(save_image_model(tmp_path / "dit", 96))) as engine:
            prompt = engine.text.tokenizer.encode("a red circle")

            async def drawn() -> tuple[list[int], dict[int, bytes]]:
                updates = [update async for update in await engine.submit(generate_image(prompt, image))]
                assert updates[-1].finish is FinishReason.STOP and not updates[-1].error
                shown = {update.denoise_step: update.image for update in updates if update.image is not None}
                return [update.denoise_step for update in updates], shown

            steps, shown = await drawn()
            assert steps == list(range(1, 101)) and list(shown) == [40, 80, 100]
            text, _ = await answer(engine, PROMPTS[0], LONG)
            streams = [asyncio.create_task(drawn()) for _ in range(2)]
            chat = asyncio.create_task(answer(engine, PROMPTS[0], LONG))
            made = engine.stats().denoise_steps
            await until(lambda: engine.stats().denoise_steps > made + 60)
            os.kill(engine.client.engine_pid, signal.SIGKILL)
            assert await asyncio.gather(*streams) == [(steps, shown)] * 2
            assert (await chat)[0] == text
            assert engine.stats().restarts == 1 and engine.stats().embedding_bytes == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", ["exit", "raise", "queue"])
def test_a_request_that_kills_two_engines_ends_alone(tiny_files: ModelFiles, fault: str) -> None:
    launch = partial(launch_engine, "tests.engine.faulty", fault)

    async def scenario() -> None:
        async with serving(tiny_files, launch) as engine:
            expected = [text for text, _ in await asyncio.gather(*(answer(engine, one, LONGEST) for one in PROMPTS))]
            innocent = [asyncio.create_task(answer(engine, prompt, LONGEST)) for prompt in PROMPTS]
            await until(lambda: engine.stats().running == len(PROMPTS))
            _, last = await answer(engine, POISON, LONGEST)
            assert last.finish is FinishReason.ERROR
            assert "twice" in last.error
            assert [text for text, _ in await asyncio.gather(*innocent)] == expected
            assert engine.stats().restarts == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("outside", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_request_alone_with_an_engine_that_others_kill_is_not_to_blame(
    tiny_files: ModelFiles, outside: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first engine is killed, and the request is alone with the second. That is killed or stopped, noticed and
    replaced, and the stream goes on as if nothing had been."""
    waiting = partial(launch_engine, "tests.engine.faulty", "wait")
    launches = iter([waiting, waiting, launch_engine])
    pids: list[int] = []

    async def scenario() -> None:
        async with serving(tiny_files, lambda: next(launches)(), heartbeat_timeout_s=3) as engine:
            stream = asyncio.create_task(answer(engine, POISON, GREEDY))
            for restarts, number in enumerate((signal.SIGKILL, outside)):
                await until(lambda n=restarts: engine.stats().restarts == n and engine.stats().open_requests)
                await until(lambda: engine.stats().waiting == 0, "the step in which it is alone")
                pids.append(engine.client.engine_pid)
                os.kill(pids[-1], number)
                with monkeypatch.context() as patch:
                    # No heartbeat of this engine is late: none comes.
                    patch.setattr(client, "TICK_SECONDS", 0.05)
                    await until(lambda: not engine.health().ready)
                    await until(lambda n=restarts: engine.stats().restarts > n)
            text, last = await stream
            assert (last.finish, last.error) == (FinishReason.LENGTH, "")
            assert text == (await answer(engine, POISON, GREEDY))[0]
            assert engine.stats().restarts == 2
            assert not any(alive(pid) for pid in pids)

    asyncio.run(scenario())


def test_logits_that_are_no_numbers_fail_that_request_alone(tiny_files: ModelFiles) -> None:
    launch = partial(launch_engine, "tests.engine.faulty", "nan")

    async def scenario() -> None:
        async with serving(tiny_files, launch) as engine:
            expected, _ = await answer(engine, PROMPTS[0], LONG)
            (text, ended), (_, broken) = await asyncio.gather(
                answer(engine, PROMPTS[0], LONG), answer(engine, POISON, LONG)
            )
            assert broken.finish is FinishReason.ERROR
            assert "not a number" in broken.error
            assert text == expected and ended.finish is FinishReason.LENGTH
            assert engine.stats().restarts == 0

    asyncio.run(scenario())


def test_aborted_at_any_stage_the_blocks_come_back(long_model: Path) -> None:
    narrow = {"max_model_len": 1 << 14, "max_num_seqs": 1, "max_prefill_chunk": 16}

    async def scenario() -> None:
        async with serving(resolve(str(long_model)), EngineThread, **narrow) as engine:
            # Of so many steps that it is left in one of them.
            long = [(7 * number) % 300 for number in range(12_000)]

            async def leave(prompt: list[int], when) -> None:
                stream = await engine.submit(sample(prompt, GREEDY))
                first = asyncio.create_task(anext(stream))
                await until(when)
                first.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await first
                await stream.aclose()

            await leave(long, lambda: engine.stats().open_requests == 1 and engine.stats().waiting == 0)
            await until(lambda: engine.stats().blocks_used == 0 and engine.stats().open_requests == 0)

            decoding = await engine.submit(sample(long[:20], GREEDY))
            await anext(decoding)
            queued = await engine.submit(sample(long[:30], GREEDY))
            await queued.aclose()
            await decoding.aclose()
            await until(lambda: engine.stats().blocks_used == 0 and engine.stats().open_requests == 0)
            assert engine.stats().running == 0
            _, last = await answer(engine, PROMPTS[0], GREEDY)
            assert last.finish is FinishReason.LENGTH

    asyncio.run(scenario())


def test_a_full_queue_refuses_at_once_and_an_engine_that_hangs_is_closed(
    tiny_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SHUTDOWN_SECONDS", 0.1)

    async def scenario() -> None:
        limits = {"max_num_seqs": 1, "max_queued_requests": 2, "max_queued_tokens": 100, "heartbeat_timeout_s": 3600}
        async with serving(tiny_files, **limits) as engine:
            os.kill(engine.client.engine_pid, signal.SIGSTOP)
            streams = [await engine.submit(sample([1, 2, 3], GREEDY)) for _ in range(2)]
            with pytest.raises(Overloaded, match="2 requests are waiting"):
                await engine.submit(sample([1, 2, 3], GREEDY))
            for stream in streams:
                await stream.aclose()
            with pytest.raises(Overloaded, match="tokens"):
                await engine.submit(sample(list(range(101)), GREEDY))
            pid = engine.client.engine_pid
        assert not alive(pid)

    asyncio.run(scenario())


def test_the_engine_dies_with_its_parent(tiny_model: Path) -> None:
    settings = {"model": str(tiny_model), "kv_cache_memory_mb": 64, "image_model": "none"}
    script = (
        "import asyncio\n"
        "from weft.backends.native import start_native\n"
        "from weft.config import load\n"
        "async def main():\n"
        f"    engine = await start_native(load({settings!r}, env={{}}))\n"
        "    engine.text.encode_chat([{'role': 'user', 'content': 'hi'}])\n"
        "    print(engine.client.engine_pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine_pid = int(parent.stdout.readline())
        children = descendants(parent.pid)
        assert engine_pid in children
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(alive(pid) for pid in children), f"the end of {children}")


def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path, smollm2_files: ModelFiles) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(smollm2_files.path.read_bytes()[:100_000])

    async def scenario() -> None:
        with pytest.raises(ModelError, match=r"broken\.gguf"):
            await start_native(load({"model": str(broken)}, env={}))
        with pytest.raises(OutOfMemory, match="needs") as error:
            await start_native(load({"max_model_len": 8192, "kv_cache_memory_mb": 16}, env={}), smollm2_files)
        assert "--kv-cache-memory-mb" in error.value.hint

    asyncio.run(scenario())


def test_an_engine_that_dies_at_once_is_not_started_for_ever(tiny_files: ModelFiles) -> None:
    async def scenario() -> None:
        with pytest.raises(EngineFault, match="exit code 7"):
            await start_native(
                load({}, env={}),
                tiny_files,
                launch=partial(EngineProcess, sys.executable, "-c", "import os; os._exit(7)"),
            )
        async with serving(tiny_files, max_restarts=1) as engine:
            engine.client._launch = partial(EngineProcess, sys.executable, "-c", "import os; os._exit(7)")
            stream = asyncio.create_task(answer(engine, PROMPTS[0], LONGEST))
            await until(lambda: engine.stats().running)
            os.kill(engine.client.engine_pid, signal.SIGKILL)
            _, last = await stream
            assert last.finish is FinishReason.ERROR
            assert engine.health().reason == "failed"

    asyncio.run(scenario())


def test_a_thread_serves_like_a_process(tiny_files: ModelFiles) -> None:
    async def scenario() -> None:
        async with serving(tiny_files, EngineThread) as engine:
            _, last = await answer(engine, PROMPTS[0], GREEDY)
            assert last.usage.completion_tokens == MAX_TOKENS
        assert engine.client.state == "closed"

    asyncio.run(scenario())


def test_the_figures_are_true_while_a_long_prompt_is_computed(
    tiny_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the engine said before the first token."""
    seen: list[EngineStats] = []
    take = EngineClient._take

    def noting(client: EngineClient, connection: Any, message: FromEngine) -> bool:
        match message:
            case StepOutput(tokens=tokens, events=events, stats=stats) if not tokens and not events:
                seen.append(stats)
            case Started(stats=stats) if stats is not None:
                seen.append(stats)
        return take(client, connection, message)

    monkeypatch.setattr(EngineClient, "_take", noting)
    monkeypatch.setattr("weft.engine.loop.STATS_SECONDS", 0.0)

    async def scenario() -> None:
        async with serving(tiny_files, EngineThread, max_num_batched_tokens=32, num_blocks=64) as engine:
            await until(lambda: engine.stats().prepared, "an engine with nothing to prepare")
            seen.clear()
            await answer(engine, [5] * 400, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))

    asyncio.run(scenario())
    computing = [stats for stats in seen if stats.running]
    assert len(computing) > 5, "one for every chunk of the prompt"
    assert all(stats.prompt_tokens == 400 and stats.blocks_used > 0 for stats in computing)
    assert not any(stats.generation_tokens for stats in computing)
    rising = [stats.computed_tokens for stats in computing]
    assert rising == sorted(rising) and rising[0] < rising[-1]
