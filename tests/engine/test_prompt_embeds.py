"""Texts and tensors of images through the engine: taken back, refused, counted on both sides, and kept for the next
engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from torch import Tensor

from tests.engine.stand_in import StandIns
from tests.engine.test_client import FILES, submitted, until
from tests.engine.test_core import core_of
from tests.engine.test_images import ROOMY, assert_undisturbed, image, serve
from tests.engine.test_out_of_memory import BOTH, EVERYWHERE
from tests.generation import generate_image
from tests.scheduler.simulation import drawing, embeds, image_limits, request
from tests.tiny_images import save_image_model
from weft.backends.contract import final_output
from weft.backends.native import NativeEngine, start_native
from weft.config import load
from weft.engine.client import EngineClient, check_tensor_capacity
from weft.engine.process import EngineThread, LaunchedEngine, launch_engine
from weft.engine.wire import StepOutput
from weft.engine_stats import EngineStats
from weft.errors import InvalidRequest, Overloaded
from weft.hub.resolve import resolve
from weft.options import SchedulerOptions
from weft.payloads import (
    MAX_BYTES,
    AdditionalInformation,
    Conditioning,
    DeclaredInput,
    InfoEntry,
    PromptEmbeds,
    conditioning_of,
)
from weft.plan import KeptHiddenStates
from weft.scheduler.scheduler import Scheduler
from weft.types import Event, FinishReason, MixedPrompt, Request
from weft.worker.diffusion.denoiser import PromptEmbedsTable

WIDTH = 96
NEGATIVE = "negative_prompt_embeds"


# Without processes.


@BOTH
@EVERYWHERE
@pytest.mark.parametrize("failing", [{0}, {1}, {2}, {4}], ids=str)
def test_a_step_without_memory_changes_no_text(where: str, overlap: bool, failing: set[int]) -> None:
    asked = [
        *(drawing(f"i{i}", [1, 2, 3], 4, negative=[4], seed=i) for i in range(2)),
        drawing("given", given=embeds(1, 2), negative=[4], steps=5),
        request("chat", [1, 2], 6),
        request("rows", MixedPrompt.of([[1], embeds(1, 2, 3, 4), [2]]), 6),
    ]
    shape = replace(ROOMY, embeds_width=2)
    events, _, runner = serve(asked, lambda number, plan: number in failing, where, overlap=overlap, shape=shape)
    assert_undisturbed(asked, events)
    assert runner.failures == len(failing)


def test_an_emptied_cache_knows_no_text() -> None:
    core, runner = core_of(ROOMY)
    for name in ("first", "second"):
        core.submit([drawing(name, [1, 2, 3], 2)])
        while core.has_work:
            core.step()
        core.reset_prefix_cache()
        core.settle()
    assert runner.worker.encoded == [3, 3]


def with_tensor(name: str, num_bytes: int) -> Request:
    data = memoryview(bytes(num_bytes))
    tensor = PromptEmbeds(data=data, shape=(1, num_bytes // 4), dtype="float32")
    return replace(drawing(name), conditioning=Conditioning(prompt=tensor))


def test_tensors_of_open_requests_are_bounded() -> None:
    """As many bytes as may be held by requests that run may wait for them."""
    limits = SchedulerOptions(max_embedding_mb=1)
    whole = with_tensor("whole", 2**20)
    check_tensor_capacity(2**20, whole, limits)
    check_tensor_capacity(2**21, drawing("none"), limits)
    with pytest.raises(Overloaded, match=r"2097152 bytes.*--max-embedding-mb"):
        check_tensor_capacity(2**21, with_tensor("more", 4), limits)
    check_tensor_capacity(0, with_tensor("too large for all", 2**22), limits)


def test_the_client_keeps_tensors_for_the_next_engine_and_lets_in_no_more_than_it_may() -> None:
    async def scenario() -> None:
        launch = StandIns()
        client = EngineClient(load({"max_embedding_mb": 1}, env={}), FILES, launch)
        await client.start()
        asked = [with_tensor(f"r{i}", 2**20) for i in range(2)]
        for one in asked:
            client.submit(one)
        with pytest.raises(Overloaded):
            client.submit(with_tensor("r2", 4))
        client.submit(drawing("no tensor"))
        first = launch.launched[0]
        assert [await submitted(first) for _ in range(3)] == [[asked[0]], [asked[1]], [drawing("no tensor")]]
        first.kill()
        await until(lambda: len(launch.launched) == 2 and client.state == "ready")
        for one in [*asked, drawing("no tensor")]:
            assert await submitted(launch.launched[1]) == [one], "under suspicion, one at a time"
            step = Event(request_id=one.request_id, denoise_step=1)
            launch.launched[1].send(StepOutput({}, [step], EngineStats()))
        with pytest.raises(Overloaded):
            client.submit(with_tensor("r2", 4))
        client.abort("r0")
        client.submit(with_tensor("r2", 4))
        await client.close()

    asyncio.run(scenario())


def test_as_many_bytes_as_a_client_may_send_reach_the_engine_and_not_one_more() -> None:
    side = 5000
    declared = DeclaredInput(stage="encode", shape=(side, side), fewer_rows=True)
    inputs = {"prompt_embeds": declared, NEGATIVE: declared, "latents": DeclaredInput(stage="denoise", shape=(1,))}
    states = np.random.default_rng(1).standard_normal((side, side), dtype=np.float32)
    assert states.nbytes == MAX_BYTES
    largest, one_more = InfoEntry(tensor=tensor(states)), InfoEntry(tensor=tensor(states[0, :1]))
    given = conditioning_of(None, AdditionalInformation(entries={NEGATIVE: largest}), known=inputs)
    with pytest.raises(InvalidRequest, match=f"{MAX_BYTES + 4} bytes together; at most {MAX_BYTES}"):
        conditioning_of(None, AdditionalInformation(entries={NEGATIVE: largest, "latents": one_more}), known=inputs)

    async def scenario() -> Request:
        launch = StandIns()
        client = EngineClient(load(env={}), FILES, launch)
        await client.start()
        client.submit(replace(drawing("i"), conditioning=given))
        (received,) = await submitted(launch.launched[0])
        await client.close()
        return received

    received = asyncio.run(scenario())
    of_images = image_limits(inputs=inputs, max_embedding_bytes=2**30)
    scheduler = Scheduler(replace(ROOMY, image=of_images))
    scheduler.add(received)
    assert received.conditioning.negative is not None and received.conditioning.negative.data == largest.tensor.data
    plan = scheduler.schedule()
    assert plan is not None and scheduler.images.memory.client_bytes == MAX_BYTES


# Behind the contract.


@pytest.fixture(scope="module")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_model(tmp_path_factory.mktemp("images") / "tiny-dit", WIDTH)


async def started(model: Path, image_model: Path, launch: Callable[[], LaunchedEngine] = EngineThread) -> NativeEngine:
    settings = {"image_model": str(image_model), "num_blocks": 64, "max_model_len": 256, "threads": 1}
    return await start_native(load(settings, env={}), resolve(str(model)), launch=launch)


def tensor(states: np.ndarray) -> PromptEmbeds:
    return PromptEmbeds(data=memoryview(states.tobytes()), shape=states.shape, dtype=str(states.dtype))


STATES = np.random.default_rng(5).standard_normal((7, WIDTH), dtype=np.float32)


async def picture(engine: NativeEngine, token_ids: list[int], **changes: object) -> bytes:
    given = Conditioning(**{name: changes.pop(name) for name in Conditioning.__struct_fields__ if name in changes})
    last = await final_output(await engine.submit(generate_image(token_ids, image(**changes), given)))
    assert last.image is not None
    return last.image


def test_states_and_prompts_are_one_to_an_image(
    tiny_model: Path, image_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[np.ndarray] = []
    hold = PromptEmbedsTable.keep

    def watching(table: PromptEmbedsTable, one: KeptHiddenStates, start: int, states: Tensor) -> None:
        held.append(states.numpy().copy())
        hold(table, one, start, states)

    monkeypatch.setattr(PromptEmbedsTable, "keep", watching)

    async def scenario() -> None:
        engine = await started(tiny_model, image_model)
        expected = await picture(engine, [5, 6, 7], negative_token_ids=[9, 8])
        prompt, away = map(tensor, held)
        assert await picture(engine, [], prompt=prompt, negative_token_ids=[9, 8]) == expected
        assert await picture(engine, [], prompt=prompt, negative=away) == expected
        assert await picture(engine, [5, 6, 7], negative=away) == expected
        assert len(held) == 2, "known texts are not encoded again"
        now = engine.stats()
        assert now.embedding_bytes == 0 and now.prompt_tokens == 5 + 2 + 3
        await engine.close()

    asyncio.run(scenario())


def test_what_cannot_be_drawn_from_is_refused_on_both_sides(tiny_model: Path, image_model: Path) -> None:
    narrow = tensor(STATES[:, :-1].copy())

    async def scenario() -> None:
        engine = await started(tiny_model, image_model)
        for prompt, changes, param in (
            ([], {"prompt": narrow}, "prompt_embeds.shape"),
            ([1], {"prompt": tensor(STATES)}, "prompt_embeds"),
            ([1], {"negative": tensor(STATES), "negative_token_ids": [1]}, "negative_prompt"),
            ([], {"prompt": PromptEmbeds(data=memoryview(b""), shape=(1, WIDTH), dtype="float32")}, None),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await picture(engine, prompt, **changes)
            assert param is None or caught.value.param == param
        assert engine.stats().open_requests == 0
        # Past the check of `submit`: the engine has its own.
        asked = replace(drawing("i", size=8), conditioning=Conditioning(prompt=narrow), prompt_token_ids=[])
        entry = engine.client.submit(asked)
        await until(lambda: engine.stats().open_requests == 0)
        (event,) = entry.take()
        assert event.finish is FinishReason.REJECTED and event.error.startswith("prompt_embeds.shape:")
        assert engine.stats().embedding_bytes == 0
        await engine.close()

    asyncio.run(scenario())


def test_leaving_gives_the_bytes_back(tiny_model: Path, image_model: Path) -> None:
    async def scenario() -> None:
        engine = await started(tiny_model, image_model)
        stream = await engine.submit(generate_image([], image(steps=1000), Conditioning(prompt=tensor(STATES))))
        assert (await anext(stream)).denoise_step == 1
        assert engine.stats().embedding_bytes >= STATES.nbytes
        await stream.aclose()
        await until(lambda: engine.stats().embedding_bytes == 0)
        await engine.close()

    asyncio.run(scenario())


def test_killed_in_mid_image_it_is_drawn_again_from_the_same_tensors(tiny_model: Path, image_model: Path) -> None:
    async def scenario() -> None:
        engine = await started(tiny_model, image_model, launch_engine)
        given = {"prompt": tensor(STATES), "negative": tensor(-STATES)}
        expected = await picture(engine, [], steps=80, **given)
        before = engine.stats().denoise_steps
        drawings = [asyncio.create_task(picture(engine, [], steps=80, **given)) for _ in range(2)]
        await until(lambda: engine.stats().denoise_steps > before + 20)
        assert engine.stats().embedding_bytes > 2 * STATES.nbytes
        os.kill(engine.client.engine_pid, signal.SIGKILL)
        assert await asyncio.gather(*drawings) == [expected] * 2
        assert engine.stats().restarts == 1 and engine.stats().embedding_bytes == 0
        await engine.close()

    asyncio.run(scenario())
