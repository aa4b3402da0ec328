"""Images from a real worker: the bits of an image drawn alone by hand, whatever is computed beside it, and without a
trace in anybody's tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from tests.tiny_images import SIZE, save_image_model
from tests.tiny_models import VOCAB_SIZE
from tests.worker.driving import Driven, Outcome, load, request, run, under_reference
from tests.worker.subjects import Subject, alone, strangers
from weft.errors import ConfigError
from weft.hub.resolve import resolve
from weft.model.diffusion import flow
from weft.model.diffusion.dit import KeysValues, encoded_bytes
from weft.model.diffusion.pipeline import KEPT_STATES
from weft.options import Config, ModelOptions, SchedulerOptions
from weft.payloads import Conditioning, InfoEntry
from weft.payloads import Tensor as ClientTensor
from weft.types import FinishReason, ImageParams, Request
from weft.worker.diffusion.denoiser import Denoiser, PromptEmbedsTable
from weft.worker.diffusion.dit_pipeline import DitPipeline
from weft.worker.runner import Runner
from weft.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = [[(a * i + b) % VOCAB_SIZE for i in range(n)] for a, b, n in ((7, 1, 5), (31, 2, 24), (11, 3, 1))]
WIDTH = 96


@pytest.fixture(scope="module")
def driven(tiny_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Driven:
    folder = save_image_model(tmp_path_factory.mktemp("images") / "dit", WIDTH)
    return load(tiny_directory("smollm2"), num_blocks=256, image_model=folder)


def image(name: str, prompt: list[int], **changes: Any) -> Request:
    asked = {"width": SIZE, "height": SIZE, "steps": 4, "guidance_scale": 2.5, "seed": 1} | changes
    return replace(request(name, prompt, 1), image=ImageParams(**asked))


def images() -> list[Request]:
    """Every kind of way to an image."""
    return [
        image("plain", TEXTS[0]),
        image("negative", TEXTS[1], negative_token_ids=TEXTS[2], seed=2, steps=7),
        image("one pass", TEXTS[2], guidance_scale=1.0, seed=3, steps=5),
        image("heun", TEXTS[0], sampler="heun", seed=4, negative_token_ids=TEXTS[1]),
        image("no prompt", [], seed=5, steps=1),
        image("away alone", TEXTS[1], guidance_scale=0.0, seed=-6, preview_every=2, steps=6),
    ]


@pytest.fixture(scope="module")
def solo(driven: Driven) -> dict[str, dict[int, bytes]]:
    return {one.request_id: run(driven, [one]).outputs[one.request_id].images for one in images()}


def assert_as_alone(outcome: Outcome, solo: dict[str, dict[int, bytes]]) -> None:
    for one in images():
        output = outcome.outputs[one.request_id]
        assert output.finish is FinishReason.STOP and not output.error
        assert output.denoise_steps == list(range(1, one.image.steps + 1))
        assert output.images == solo[one.request_id], one.request_id


@torch.inference_mode()
def drawn_by_hand(driven: Driven, asked: Request, text: Tensor, negative: Tensor) -> bytes:
    """Flow matching in a few lines: one image, one pass after the other."""
    model, params = driven.runner.denoiser.pipeline.model, asked.image
    config = model.config
    times = flow.times(params.steps, config.shift)

    def velocity(latents: Tensor, t: Tensor) -> Tensor:
        def given(states: Tensor) -> Tensor:
            padded = torch.zeros(1, config.max_text_tokens, config.text_width)
            padded[0, : len(states)] = states
            return model.velocity(latents, t, padded, torch.tensor([len(states)]))

        towards = given(text)
        return towards if params.guidance_scale == 1 else torch.lerp(given(negative), towards, params.guidance_scale)

    latents = flow.noise(params.seed, config.latent_shape)[None]
    for i in range(params.steps):
        latents = flow.STEPS[params.sampler](latents, times[i : i + 1], times[i + 1 : i + 2], velocity)
    return flow.pixels(latents).numpy().tobytes()


def test_an_image_is_what_the_models_make_by_hand(
    driven: Driven, solo: dict[str, dict[int, bytes]], tiny_directory: Callable[[str], Path]
) -> None:
    from tests.model import reference_models

    reference = reference_models.from_directory(tiny_directory("smollm2"))

    def states(prompt: list[int]) -> Tensor:
        if not prompt:
            return torch.zeros(0, WIDTH)
        with torch.inference_mode():
            return reference.model(torch.tensor([prompt])).last_hidden_state[0]

    for one in images():
        expected = drawn_by_hand(driven, one, states(one.prompt_token_ids), states(one.image.negative_token_ids))
        got = solo[one.request_id][one.image.steps]
        off = [abs(a - b) for a, b in zip(got, expected, strict=True)]
        assert max(off) <= 1, f"{one.request_id}: another model's hidden states round differently, by no more than this"
        assert len(set(got)) > 8


def test_the_latents_and_sigmas_of_a_client_take_the_place_of_noise_and_times(
    driven: Driven, solo: dict[str, dict[int, bytes]]
) -> None:
    config = driven.runner.denoiser.pipeline.model.config
    noise, times = flow.noise(1, config.latent_shape).numpy(), flow.times(4, config.shift).tolist()
    latents = InfoEntry(tensor=ClientTensor(data=memoryview(noise.tobytes()), shape=noise.shape, dtype="float32"))
    own = {
        "the same": ({"latents": latents, "sigmas": InfoEntry(values=times[:-1])}, {"seed": 5}),
        "other times": ({"sigmas": InfoEntry(values=[1, 0.5, 0.25, 0.125])}, {}),
        "other noise": ({"latents": latents}, {"seed": 1, "steps": 3}),
    }
    asked = [
        replace(image(name, TEXTS[0], **changes), conditioning=Conditioning(information=entries))
        for name, (entries, changes) in own.items()
    ]
    outputs = run(driven, asked).outputs
    plain = solo["plain"][4]
    assert outputs["the same"].images[4] == plain and outputs["other times"].images[4] != plain
    assert outputs["other noise"].images == run(driven, [image("seed", TEXTS[0], steps=3)]).outputs["seed"].images


CONDITIONS: dict[str, dict[str, Any]] = {
    "together": {},
    "late": {"overlap": True},
    "chunks": {"max_prefill_chunk": 5, "overlap": True},
    "preempted": {"max_prefill_chunk": 9, "force_preempt_every": 3},
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_an_image_has_the_same_bits_alone_and_together(
    driven: Driven, solo: dict[str, dict[int, bytes]], condition: str
) -> None:
    assert_as_alone(run(driven, images(), **CONDITIONS[condition]), solo)


def test_at_different_steps_and_among_the_dying(driven: Driven, solo: dict[str, dict[int, bytes]]) -> None:
    later = [(3 * i, one) for i, one in enumerate(images())]
    gone = [image(f"gone {i}", TEXTS[i], seed=9 + i, steps=30) for i in range(3)]
    aborts = [(4, "gone 0"), (7, "gone 1"), (11, "gone 2")]
    assert_as_alone(run(driven, gone, later=later, aborts=aborts), solo)


@pytest.fixture(scope="module")
def chats(driven: Driven) -> Subject:
    return alone(driven, [[5, 9, 200, 31], list(range(3, 40))], 12)


@pytest.mark.parametrize("overlap", [False, True])
def test_beside_chats_neither_changes(
    driven: Driven, solo: dict[str, dict[int, bytes]], chats: Subject, overlap: bool
) -> None:
    later = [(i, one) for i, one in enumerate(images())] + strangers(3, 10)
    outcome = run(driven, chats.requests(), later=later, overlap=overlap, max_prefill_chunk=16)
    assert_as_alone(outcome, solo)
    chats.check(outcome)


def test_on_the_torch_path_too(driven: Driven, solo: dict[str, dict[int, bytes]]) -> None:
    """The language model's reference rounds differently; the images follow it by no more than a bit."""
    model, slots = driven.runner.denoiser.pipeline.model, driven.limits.image.max_num_images
    cpu = torch.device("cpu")
    texts = PromptEmbedsTable(2 * slots, model.config.max_text_tokens, WIDTH, dtype=torch.float32, device=cpu)
    denoiser = Denoiser(DitPipeline(model, texts), slots, device=cpu, embeds=texts)
    slow = Driven(Runner(under_reference(driven).runner.stepper, denoiser=denoiser), driven.limits)
    outcome = run(slow, images())
    for one in images():
        got, expected = outcome.outputs[one.request_id].images, solo[one.request_id]
        for step, pixels in expected.items():
            assert max(abs(a - b) for a, b in zip(got[step], pixels, strict=True)) <= 1


@pytest.mark.parametrize("place", ["launch", "model", "denoise", "sampler"])
@pytest.mark.parametrize("overlap", [False, True])
def test_steps_without_memory_change_no_image(
    driven: Driven, solo: dict[str, dict[int, bytes]], place: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = driven.runner
    owner, name = {
        "launch": (runner, "execute"),
        "model": (runner.stepper, "step"),
        "denoise": (runner.denoiser, "_denoise_group"),
        "sampler": (runner, "_sampled"),
    }[place]
    function, calls = getattr(owner, name), iter(range(10**6))

    def poor(*arguments: Any) -> Any:
        if next(calls) in (2, 9):
            raise torch.OutOfMemoryError("the test took it all")
        return function(*arguments)

    monkeypatch.setattr(owner, name, poor)
    outcome = run(driven, [request("chat", TEXTS[0], 20), *images()], overlap=overlap)
    assert next(calls) > 10
    assert_as_alone(outcome, solo)


def test_whole_images_at_once_are_the_same_images(driven: Driven, solo: dict[str, dict[int, bytes]]) -> None:
    outcome = run(driven, images(), image=replace(driven.limits.image, whole_images=True))
    for one in images():
        output, steps = outcome.outputs[one.request_id], one.image.steps
        assert output.denoise_steps == [steps] and output.images == {steps: solo[one.request_id][steps]}


def test_what_is_no_number_ends_that_image_alone(
    driven: Driven, solo: dict[str, dict[int, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, denoise = driven.runner.denoiser.pipeline.model, driven.runner.denoiser.pipeline.model.denoise
    bad = flow.noise(77, model.config.latent_shape)

    def breaks(latents: Tensor, condition: Tensor, words: list[KeysValues]) -> Tensor:
        found: Tensor = denoise(latents, condition, words)
        for i, one in enumerate(latents):
            if torch.equal(one, bad):
                found[i] = float("nan")
        return found

    monkeypatch.setattr(model, "denoise", breaks)
    outcome = run(driven, [image("broken", TEXTS[0], seed=77), *images()])
    broken = outcome.outputs["broken"]
    assert broken.finish is FinishReason.ERROR and "not a number" in broken.error and not broken.images
    assert_as_alone(outcome, solo)


def test_a_prompt_whose_states_are_no_numbers_is_never_drawn(
    tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    driven = load(tiny_directory("smollm2"), image_model=save_image_model(tmp_path / "dit", WIDTH))
    driven.runner.stepper.model.weights.embedding[17] = float("nan")
    outcome = run(driven, [image("broken", [1, 17]), image("sound", [1, 2])])
    assert "not a number" in outcome.outputs["broken"].error and outcome.outputs["broken"].denoise_steps == []
    assert outcome.outputs["sound"].finish is FinishReason.STOP
    assert outcome.stats.embedding_bytes == outcome.stats.images_running == 0


def test_memory_is_counted(driven: Driven) -> None:
    denoiser, of_images = driven.runner.denoiser, driven.limits.image
    slots = of_images.max_num_images
    model = sum(weight.numel() * 4 for weight in denoiser.pipeline.model.parameters())
    geometry, latents = denoiser.pipeline.model.config, KEPT_STATES * 3 * SIZE * SIZE * 4
    readings = 2 * encoded_bytes(geometry, torch.float32)
    assert of_images.latent_slot_bytes == latents + readings and of_images.embeds_bytes == 24 * WIDTH * 4
    # Texts are read, and their readings allocated, when their image is drawn.
    assert denoiser.num_bytes == model + slots * (latents + 2 * of_images.embeds_bytes)


def test_there_are_as_many_latent_slots_as_their_memory_holds(
    tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    files, folder = resolve(str(tiny_directory("smollm2"))), save_image_model(tmp_path / "dit", WIDTH)
    options = SchedulerOptions(max_num_images=100, max_embedding_mb=1)
    worker = Worker(
        Config(ModelOptions(device="cpu", image_model=str(folder), max_model_len=64), scheduler=options), files
    )
    of_images = worker.limits.image
    assert of_images.max_num_images == 2**20 // (of_images.latent_slot_bytes + 2 * of_images.embeds_bytes) == 18
    assert (
        worker.info.memory.weights == worker.runner.stepper.model.weights.num_bytes + worker.runner.denoiser.num_bytes
    )
    save_image_model(folder, WIDTH, max_text_tokens=2000)
    with pytest.raises(ConfigError, match="--max-embedding-mb 1: an image of this model holds"):
        Worker(Config(ModelOptions(device="cpu", image_model=str(folder)), scheduler=options), files)


def test_the_switch_is_the_schedulers(
    tiny_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.worker.diffusion.load.is_on", lambda name: name != "denoise-steps")
    driven = load(tiny_directory("smollm2"), image_model=save_image_model(tmp_path / "dit", WIDTH))
    assert driven.limits.image.whole_images
    assert run(driven, images()).outputs["plain"].denoise_steps == [4]
