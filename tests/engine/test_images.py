"""Images through the engine: steps without memory, engines that die, and the way in from the endpoints."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.effort import EFFORT
from tests.engine.test_core import core_of
from tests.engine.test_out_of_memory import BOTH, EVERYWHERE, WHERE, Fails, PoorRunner
from tests.generation import generate_image, sample
from tests.scheduler.simulation import (
    drawing,
    events_of,
    expected_images,
    expected_output,
    image_limits,
    limits,
    request,
)
from tests.tiny_images import SIZE, save_image_model
from tests.waiting import until
from weft.backends.native import NativeEngine, start_native
from weft.config import load
from weft.engine.core import EngineCore
from weft.engine.journal import Journal, Place
from weft.engine.process import EngineThread, LaunchedEngine, launch_engine
from weft.errors import ConfigError, ContextTooLong, InvalidRequest
from weft.hub.resolve import resolve
from weft.plan import Limits, StepPlan
from weft.scheduler.integrity import check_integrity
from weft.scheduler.scheduler import NO_MEMORY, Scheduler
from weft.types import Event, FinishReason, ImageParams, LatentCheckpoint, Output, Request, SamplingParams

ROOMY = limits(num_blocks=200, max_num_seqs=8, max_num_batched_tokens=64, image=image_limits())
IMAGES = [drawing(f"i{i}", [i] * (i + 1), 4 + i, seed=i, negative=[7] * (i % 3), preview_every=i % 2) for i in range(5)]
CHATS = [request(f"c{i}", [i * 3, 1, 2], 12) for i in range(4)]
MIXED = [*CHATS[:2], *IMAGES, *CHATS[2:]]


def serve(
    requests: list[Request], fails: Fails, where: str = "after", *, overlap: bool = False, shape: Limits = ROOMY
) -> tuple[dict[str, list[Event]], EngineCore, PoorRunner]:
    runner = PoorRunner(shape.block_size, fails, where)
    core = EngineCore(Scheduler(shape), runner, overlap=overlap)
    assert core.submit(requests) == []
    events: dict[str, list[Event]] = {one.request_id: [] for one in requests}
    for _ in range(20_000):
        if not core.has_work:
            break
        for event in events_of(core.step()):
            events[event.request_id].append(event)
        check_integrity(core.scheduler)
    core.settle()
    now = core.stats()
    assert (now.running, now.blocks_used, now.images_running, now.embedding_bytes) == (0, 0, 0, 0)
    return events, core, runner


def assert_undisturbed(requests: list[Request], events: dict[str, list[Event]]) -> None:
    for asked in requests:
        got = events[asked.request_id]
        if asked.image is None:
            assert [token for event in got for token in event.token_ids] == expected_output(asked, 64)
        else:
            assert [event.denoise_step for event in got] == list(range(1, asked.image.steps + 1)), "a step told twice"
            shown = {event.denoise_step: event.image for event in got if event.image is not None}
            assert shown == expected_images(asked)
        assert [event.finish for event in got[:-1]] == [None] * (len(got) - 1)
        assert got[-1].finish is not None and not got[-1].error


@BOTH
@EVERYWHERE
@pytest.mark.parametrize("failing", [{0}, {1}, {3}, {6}, {2, 3}, {4, 12}], ids=str)
def test_a_step_without_memory_is_taken_back_and_no_image_changes(where: str, overlap: bool, failing: set[int]) -> None:
    events, _, runner = serve(MIXED, lambda number, plan: number in failing, where, overlap=overlap)
    assert_undisturbed(MIXED, events)
    assert runner.failures == len(failing)


@BOTH
@EVERYWHERE
def test_a_step_that_was_taken_back_is_all_that_is_made_again(where: str, overlap: bool) -> None:
    (asked,) = wanted = [drawing("i", [1], 9)]
    events, _, runner = serve(wanted, lambda number, plan: number == 5, where, overlap=overlap)
    assert_undisturbed(wanted, events)
    twice = {"before": 0, "after": 1, "reading": 1 + overlap}[where]
    assert runner.worker.denoised == asked.image.steps + twice


@BOTH
@EVERYWHERE
def test_an_image_for_which_there_is_never_memory_ends_alone(where: str, overlap: bool) -> None:
    def has_i3(number: int, plan: StepPlan) -> bool:
        slots.difference_update(plan.release_slots)
        slots.update(one.slot for one in plan.admit_images if one.image.seed == 3)
        return any(one.slot in slots for one in plan.denoise)

    slots: set[int] = set()
    events, _, _ = serve(MIXED, has_i3, where, overlap=overlap)
    (end,) = events.pop("i3")
    assert end.finish is FinishReason.ERROR and end.error == NO_MEMORY
    assert_undisturbed([one for one in MIXED if one.request_id != "i3"], events)


@settings(max_examples=40 * EFFORT)
@given(
    seed=st.integers(0, 2**32),
    where=st.sampled_from(WHERE),
    overlap=st.booleans(),
    share=st.sampled_from([0.02, 0.1, 0.3]),
    whole=st.booleans(),
)
def test_whatever_fails_every_request_ends_once(
    seed: int, where: str, overlap: bool, share: float, whole: bool
) -> None:
    rnd = random.Random(seed)
    shape = replace(ROOMY, max_num_seqs=rnd.randint(1, 8), image=image_limits(whole_images=whole, max_num_images=2))
    runner = PoorRunner(shape.block_size, lambda number, plan: rnd.random() < share, where)
    core = EngineCore(Scheduler(shape), runner, overlap=overlap)
    core.submit(MIXED)
    ends: dict[str, Event] = {}
    progress: dict[str, list[int]] = {}
    while core.has_work:
        for event in events_of(core.step()):
            assert event.request_id not in ends
            if event.denoise_step is not None:
                progress.setdefault(event.request_id, []).append(event.denoise_step)
            if event.finish is not None:
                ends[event.request_id] = event
        check_integrity(core.scheduler)
    assert ends.keys() == {one.request_id for one in MIXED}
    for asked in IMAGES:
        end, told = ends[asked.request_id], progress.get(asked.request_id, [])
        assert told == sorted(set(told))
        assert end.error == NO_MEMORY or end.image == expected_images(asked)[asked.image.steps]


def test_an_image_is_named_before_the_first_step_that_computes_it() -> None:
    core, _ = core_of(ROOMY)
    core.submit([drawing("encoded", [1], 2), drawing("at once", [], 2)])
    named: list[list[str]] = []
    while core.has_work:
        core.step(on_start=named.append)
    assert named == [["encoded", "at once"], ["encoded"]], "once for each stage"


# The journal.


def test_a_step_that_a_new_engine_makes_again_is_not_told_twice() -> None:
    journal = Journal()
    entry = journal.open(drawing("i", [1], 4))
    for step in (1, 2):
        journal.record(Event(request_id="i", denoise_step=step))
    assert entry.place is Place.PROVEN
    journal.engine_died()
    assert entry.resumed() == entry.request and entry.place is Place.HELD
    for step in (1, 2, 3):
        journal.record(Event(request_id="i", denoise_step=step, image=b"preview" if step == 2 else None))
        assert entry.place is Place.PROVEN
    journal.record(Event(request_id="i", denoise_step=4, image=b"done", finish=FinishReason.STOP))
    assert [event.denoise_step for event in entry.take()] == [1, 2, 3, 4]


def checkpoint_event(name: str, step: int, latents: bytes) -> Event:
    return Event(request_id=name, denoise_step=step, checkpoint=LatentCheckpoint(step, latents))


def test_the_newest_checkpoint_of_an_open_image_is_kept_within_bounds() -> None:
    journal = Journal(max_checkpoint_bytes=10)
    first, second = (journal.open(drawing(name, [1], 40)) for name in ("i", "j"))
    for step in (10, 20):
        journal.record(checkpoint_event("i", step, bytes(6)))
        assert first.resumed().checkpoint == LatentCheckpoint(step, bytes(6)) and journal.checkpoint_bytes == 6
    journal.record(checkpoint_event("j", 10, bytes(6)))
    assert second.resumed() == second.request, "there is no memory for it: that image starts again"
    assert [event.checkpoint for event in first.take() + second.take()] == [None] * 3, "the user gets none"
    journal.engine_died()
    journal.record(checkpoint_event("i", 20, b"again"))
    assert first.take() == [] and first.resumed().checkpoint == LatentCheckpoint(20, b"again")
    journal.close("i")
    assert journal.checkpoint_bytes == 0


def test_the_end_of_an_image_is_told_whatever_its_step() -> None:
    journal = Journal()
    entry = journal.open(drawing("i", [1], 1))
    journal.record(Event(request_id="i", denoise_step=1))
    journal.record(Event(request_id="i", denoise_step=1, image=b"done", finish=FinishReason.STOP))
    assert entry.take()[-1].finish is FinishReason.STOP


# Behind the contract, in a thread.


@asynccontextmanager
async def drawing_engine(
    model: Path, image_model: str, launch: Callable[[], LaunchedEngine] = EngineThread, **changes: object
) -> AsyncIterator[NativeEngine]:
    config = load({"image_model": image_model, "num_blocks": 64, "max_model_len": 256, "threads": 1, **changes}, env={})
    engine = await start_native(config, resolve(str(model)), launch=launch)
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture(scope="module")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_model(tmp_path_factory.mktemp("images") / "tiny-dit", 96)


def image(**changes: object) -> ImageParams:
    return ImageParams(**({"width": SIZE, "height": SIZE, "steps": 5, "guidance_scale": 2.0, "seed": 3} | changes))


async def updates(engine: NativeEngine, prompt: list[int], asked: ImageParams) -> list[Output]:
    return [update async for update in await engine.submit(generate_image(prompt, asked))]


def test_an_image_comes_step_by_step(tiny_model: Path, image_model: Path) -> None:
    async def scenario() -> None:
        async with drawing_engine(tiny_model, str(image_model)) as engine:
            drawn_by = engine.model.images
            assert drawn_by is not None and (drawn_by.name, drawn_by.width, drawn_by.steps) == ("tiny-dit", SIZE, 6)
            got = await updates(engine, [5, 6, 7], image(preview_every=2, negative_token_ids=[9]))
            assert [update.denoise_step for update in got] == [1, 2, 3, 4, 5]
            assert [update.image is not None for update in got] == [False, True, False, True, True]
            assert [len(update.image) for update in got if update.image] == [SIZE * SIZE * 3] * 3
            assert [update.finish for update in got] == [None] * 4 + [FinishReason.STOP]
            assert got[-1].usage.prompt_tokens == 4
            again = await updates(engine, [5, 6, 7], image(negative_token_ids=[9]))
            assert again[-1].image == got[-1].image
            other = await updates(engine, [5, 6, 8], image(negative_token_ids=[9]))
            assert other[-1].image != got[-1].image, "another prompt, the same image"
            now = engine.stats()
            assert (now.images, now.denoise_steps, now.embedding_bytes, now.images_running) == (3, 15, 0, 0)

    asyncio.run(scenario())


def test_a_killed_engine_costs_an_image_no_more_steps_than_are_between_two_checkpoints(
    tiny_model: Path, image_model: Path
) -> None:
    """The same bytes come, and each step is told once."""
    between, steps = 7, 120
    wanted = [image(steps=steps, sampler=sampler, negative_token_ids=[9]) for sampler in ("euler", "heun")]

    async def scenario() -> None:
        async with drawing_engine(
            tiny_model, str(image_model), launch_engine, image_checkpoint_steps=between
        ) as engine:
            whole = [await updates(engine, [5, 6, 7], asked) for asked in wanted]
            before = engine.stats().denoise_steps
            drawings = [asyncio.create_task(updates(engine, [5, 6, 7], asked)) for asked in wanted]
            await until(lambda: engine.stats().denoise_steps > before + 80, "steps to lose")
            os.kill(engine.client.engine_pid, signal.SIGKILL)
            again = await asyncio.gather(*drawings)
            assert [drawn[-1].image for drawn in again] == [drawn[-1].image for drawn in whole]
            for drawn in again:
                assert [update.denoise_step for update in drawn] == list(range(1, steps + 1))
            # Steps of which the engine had not told when it died are not counted: it may have made one more of each.
            twice = engine.stats().denoise_steps - before - 2 * steps
            assert engine.stats().restarts == 1 and 0 <= twice <= 2 * between

    asyncio.run(scenario())


def test_leaving_ends_an_image(tiny_model: Path, image_model: Path) -> None:
    async def scenario() -> None:
        async with drawing_engine(tiny_model, str(image_model)) as engine:
            stream = await engine.submit(generate_image([1, 2], image(steps=1000)))
            assert (await anext(stream)).denoise_step == 1
            await stream.aclose()
            assert [update async for update in stream] == []
            await until(
                lambda: not engine.stats().images_running and not engine.stats().open_requests, "the image's end"
            )
            assert engine.stats().embedding_bytes == 0

    asyncio.run(scenario())


def test_what_cannot_be_drawn_is_refused_at_once(tiny_model: Path, image_model: Path) -> None:
    async def scenario() -> None:
        async with drawing_engine(tiny_model, str(image_model)) as engine:
            for prompt, asked, wrong in (
                ([1], image(width=64), InvalidRequest),
                ([1] * 25, image(), ContextTooLong),
                ([1], image(negative_token_ids=[1] * 25), ContextTooLong),
                ([10**6], image(), InvalidRequest),
                ([1], image(steps=0), InvalidRequest),
            ):
                with pytest.raises(wrong):
                    await engine.submit(generate_image(prompt, asked))
            assert engine.stats().open_requests == 0

    asyncio.run(scenario())


def test_without_an_image_model_there_is_none(tiny_model: Path) -> None:
    async def scenario() -> None:
        for wanted in ("none", "auto"):
            async with drawing_engine(tiny_model, wanted) as engine:
                assert engine.model.images is None
                with pytest.raises(InvalidRequest, match="no image model"):
                    await engine.submit(generate_image([1], image()))
                params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
                assert [output async for output in await engine.submit(sample([1, 2], params))]

    asyncio.run(scenario())


def refusal_of(model: Path, wanted: str, **changes: object) -> str:
    async def scenario() -> None:
        async with drawing_engine(model, wanted, **changes):
            pass

    with pytest.raises(ConfigError) as caught:
        asyncio.run(scenario())
    return str(caught.value)


def test_an_image_model_for_another_language_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    wrong = save_image_model(tmp_path / "wide", 128)
    assert "128 wide" in refusal_of(tiny_model, str(wrong)) and "96 wide" in refusal_of(tiny_model, str(wrong))


def test_an_image_model_that_is_not_there_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    assert "config.json" in refusal_of(tiny_model, str(tmp_path))


def test_the_packaged_model_draws_for_its_own_language_model(
    tiny_model: Path, image_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft.worker.diffusion import load as images

    monkeypatch.setattr(images, "PACKAGED", save_image_model(tmp_path / "shapes", 96, text_model="smollm2"))
    assert images.find_image_model("auto", "smollm2", 96) == tmp_path / "shapes"
    assert images.find_image_model("auto", "another", 96) is None
    assert images.find_image_model("auto", "smollm2", 128) is None, "one of that name, and not that model"
    (tmp_path / "shapes" / "model.safetensors").unlink()
    assert images.find_image_model("auto", "smollm2", 96) is None
