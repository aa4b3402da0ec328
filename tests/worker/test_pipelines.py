"""Pipelines in a real worker: an image is the same in any company, and one that fails does so alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from tests.tiny_pipelines import MAKERS, SIZE, save_pipeline
from tests.worker.driving import Driven, Outcome, load, request, run
from tests.worker.subjects import alone
from weft.errors import InvalidRequest
from weft.model.diffusion import flow
from weft.model.diffusion.diffusers_pipeline import DiffusersPipeline
from weft.model.diffusion.pipeline import KEPT_STATES
from weft.plan import StepPlan
from weft.scheduler.scheduler import Scheduler
from weft.types import FinishReason, ImageParams, Request
from weft.worker.memory_profile import denoise, largest_image_steps

if importlib.util.find_spec("diffusers") is None:
    pytest.skip("diffusers is not installed", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=[name for name in MAKERS if name != "PixArtAlphaPipeline"])
def driven(
    request: pytest.FixtureRequest, tiny_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Driven:
    folder = save_pipeline(request.param, tmp_path_factory.mktemp("pipelines") / request.param)
    return load(tiny_directory("smollm2"), num_blocks=256, image_model=folder)


def pipeline_of(driven: Driven) -> DiffusersPipeline:
    pipeline = driven.runner.denoiser.pipeline
    assert isinstance(pipeline, DiffusersPipeline)
    return pipeline


def image(name: str, text: str, **changes: Any) -> Request:
    asked = {"width": SIZE, "height": SIZE, "steps": 4, "guidance_scale": 2.5, "seed": 1, "prompt_text": text} | changes
    return replace(request(name, [], 1), image=ImageParams(**asked))


def images() -> list[Request]:
    return [
        image("plain", "a red cat"),
        image("negative", "the blue dog", negative_text="a red mat", seed=2, steps=5, preview_every=2),
        image("one pass", "a cat on the mat", guidance_scale=1.0, seed=3, steps=3),
        image("no prompt", "", seed=-5, steps=1),
        image("away alone", "a dog", guidance_scale=0.0, seed=6, steps=4),
    ]


@pytest.fixture(scope="module")
def solo(driven: Driven) -> dict[str, dict[int, bytes]]:
    return {one.request_id: run(driven, [one]).outputs[one.request_id].images for one in images()}


def assert_as_alone(outcome: Outcome, solo: dict[str, dict[int, bytes]]) -> None:
    """A step in company may round differently, by no more than shows in the last bit of a colour."""
    for one in images():
        output = outcome.outputs[one.request_id]
        assert output.finish is FinishReason.STOP and not output.error
        assert output.denoise_steps == list(range(1, one.image.steps + 1))
        assert output.images.keys() == solo[one.request_id].keys()
        for step, pixels in solo[one.request_id].items():
            assert len(pixels) == SIZE * SIZE * 3 and len(set(pixels)) > 8
            assert max(abs(a - b) for a, b in zip(output.images[step], pixels, strict=True)) <= 1, one.request_id
    assert outcome.stats.embedding_bytes == outcome.stats.images_running == 0


def test_images_differ(solo: dict[str, dict[int, bytes]]) -> None:
    assert len({shown[max(shown)] for shown in solo.values()}) == len(images())


@pytest.mark.parametrize("overlap", [False, True])
def test_beside_chats_and_the_dying_neither_changes(
    driven: Driven, solo: dict[str, dict[int, bytes]], overlap: bool
) -> None:
    chats = alone(driven, [[5, 9, 200, 31]], 12)
    later = [(2 * i, one) for i, one in enumerate(images())]
    gone = image("gone", "the mat", steps=30)
    outcome = run(driven, [gone, *chats.requests()], later=later, aborts=[(5, "gone")], overlap=overlap)
    assert_as_alone(outcome, solo)
    chats.check(outcome)


@pytest.mark.parametrize("place", ["prepare", "encode", "denoise_step", "decode"])
def test_steps_without_memory_change_no_image(
    driven: Driven, solo: dict[str, dict[int, bytes]], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipeline_of(driven)
    function, calls = getattr(pipeline, place), iter(range(10**6))

    def poor(*arguments: Any) -> Any:
        if next(calls) in (1, 3):
            raise torch.OutOfMemoryError("the test took it all")
        return function(*arguments)

    monkeypatch.setattr(pipeline, place, poor)
    assert_as_alone(run(driven, images(), overlap=True), solo)
    assert next(calls) > 4


def test_an_image_goes_on_from_any_checkpoint_bit_for_bit(driven: Driven) -> None:
    """What the scheduler remembers of the steps before is in it."""
    asked = image("i", "a red cat", steps=7, preview_every=3)
    every_step = replace(driven.limits.image, checkpoint_steps=1)
    whole = run(driven, [asked], overlap=True, image=every_step).outputs["i"]
    assert list(whole.checkpoints) == [1, 2, 3, 4, 5, 6]
    for step, checkpoint in whole.checkpoints.items():
        resumed = run(driven, [replace(asked, checkpoint=checkpoint)], overlap=True).outputs["i"]
        assert resumed.denoise_steps == list(range(step + 1, 8))
        assert resumed.images.items() <= whole.images.items() and resumed.images[7] == whole.images[7]


def test_text_encoder_and_vae_work_in_units_that_were_planned_and_nowhere_else(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step decodes beside no more image work than its credit, or one unit."""
    family, runner = pipeline_of(driven).family, driven.runner
    called: list[str] = []
    planned: list[tuple[int, list[str], list[str]]] = []

    def watch(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            called.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    watch(family, "encode")
    watch(family.vae, "decode")
    execute = runner.execute

    def executed(plan: StepPlan) -> Any:
        called.clear()
        pending = execute(plan)
        units = [one.stage for one in plan.denoise if one.stage != "denoise"]
        planned.append((sum(one.cost for one in plan.denoise) if plan.rows else 0, units, called.copy()))
        return pending

    monkeypatch.setattr(runner, "execute", executed)
    of_images = replace(driven.limits.image, max_mixed_denoise=1)
    run(driven, [request("chat", [5, 9, 200], 120), *images()], image=of_images)
    assert all(set(calls) == set(units) for _, units, calls in planned)
    assert sum(len(units) for _, units, _ in planned) == 2 * 4 + 1 + 7, "prompts, and pictures with two previews"
    largest = max(of_images.encode_cost, of_images.decode_cost, 2 * of_images.num_tokens)
    assert max(cost for cost, *_ in planned[1:]) <= largest


def test_whole_images_at_once_are_the_same_images(driven: Driven, solo: dict[str, dict[int, bytes]]) -> None:
    outcome = run(driven, images(), image=replace(driven.limits.image, whole_images=True))
    for one in images():
        output, steps = outcome.outputs[one.request_id], one.image.steps
        expected = solo[one.request_id][steps]
        assert output.denoise_steps == [steps]
        assert max(abs(a - b) for a, b in zip(output.images[steps], expected, strict=True)) <= 1


def broken_for(seed: int, driven: Driven, monkeypatch: pytest.MonkeyPatch, place: str, failure: Any) -> None:
    """What one image ends with as its latents goes wrong in one of the contract's calls."""
    pipeline = pipeline_of(driven)
    function = getattr(pipeline, place)
    noise = flow.noise(seed, pipeline.latent_shape)

    def fails(first: Any, *rest: Any) -> Any:
        if place in ("prepare", "encode"):
            params = first.image if place == "prepare" else first.params
            return failure() if params.seed == seed else function(first, *rest)
        found: Tensor = function(first, *rest)
        for i, latents in enumerate(first):
            if torch.equal(latents, noise):
                found[i] = failure()
        return found

    monkeypatch.setattr(pipeline, place, fails)
    if place == "decode":
        monkeypatch.setattr(pipeline, "denoise_step", lambda latents, *rest: latents)


def raises() -> None:
    raise ValueError("a broken picture")


@pytest.mark.parametrize(
    ("place", "failure", "told"),
    [
        ("prepare", raises, "could not begin"),
        ("encode", raises, "could not begin"),
        ("denoise_step", lambda: float("nan"), "not a number"),
        ("decode", lambda: float("inf"), "not a number"),
        ("decode", raises, "could not decode the latents"),
    ],
)
def test_what_fails_ends_that_image_alone(
    driven: Driven, monkeypatch: pytest.MonkeyPatch, place: str, failure: Any, told: str
) -> None:
    broken_for(77, driven, monkeypatch, place, failure)
    others = [image(f"sound {i}", "a cat", seed=i) for i in range(2)]
    outcome = run(driven, [others[0], image("broken", "a dog", seed=77), others[1]])
    broken = outcome.outputs["broken"]
    assert broken.finish is FinishReason.ERROR and told in broken.error and not broken.images
    for one in others:
        output = outcome.outputs[one.request_id]
        assert output.finish is FinishReason.STOP and output.images.keys() == {4}
    assert outcome.stats.embedding_bytes == outcome.stats.images_running == 0


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"negative_token_ids": [1]}, "reads prompts as text"),
        ({"sampler": "heun"}, "a scheduler of its own"),
        ({"width": 2 * SIZE}, f"makes {SIZE}x{SIZE}"),
        ({"text": "a" * 4001}, "4001 characters"),
    ],
    ids=["tokens", "sampler", "size", "length"],
)
def test_what_a_pipeline_does_not_do_is_refused(driven: Driven, wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        Scheduler(driven.limits).add(image("wrong", **({"text": "a cat"} | wrong)))


def test_memory_is_counted(driven: Driven) -> None:
    denoiser, of_images = driven.runner.denoiser, driven.limits.image
    latents = of_images.max_num_images * KEPT_STATES * 4 * 8 * 8 * 4
    assert denoiser.num_bytes == pipeline_of(driven).num_bytes + latents
    assert of_images.latent_slot_bytes > KEPT_STATES * 4 * 8 * 8 * 4 and of_images.max_num_embeds == 0


def test_the_largest_step_is_measured_and_leaves_nothing_behind(
    driven: Driven, solo: dict[str, dict[int, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_images, pipeline = driven.limits.image, pipeline_of(driven)
    seen: list[tuple[str, int]] = []

    def watch(name: str) -> None:
        function = getattr(pipeline, name)

        def watched(first: Any, *rest: Any) -> Any:
            seen.append((name, 1 if name == "encode" else len(first)))
            return function(first, *rest)

        monkeypatch.setattr(pipeline, name, watched)

    for name in ("encode", "denoise_step", "decode"):
        watch(name)
    most, costs = of_images.max_num_images, (of_images.num_tokens * 2, of_images.encode_cost, of_images.decode_cost)
    for budget in (3 * max(costs) + 1, 10**6, 1):
        seen.clear()
        for plan in largest_image_steps(budget, of_images):
            denoise(plan, driven.runner.denoiser)
            assert plan.num_requests == 1 or plan.num_tokens <= budget
        steps, prompts, decodings = (max(1, min(most, budget // cost)) for cost in costs)
        assert seen == [("denoise_step", steps), *[("encode", 1)] * prompts, ("decode", decodings)]
    monkeypatch.undo()
    assert_as_alone(run(driven, images()), solo)
