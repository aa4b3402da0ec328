"""Pipelines of `diffusers` as pipelines: the images that the library makes by itself, in any company."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import asdict, replace
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.tiny_pipelines import MAKERS, save_pipeline
from weft.errors import ConfigError, InvalidRequest, ModelError
from weft.model.diffusion import flow
from weft.model.diffusion.diffusers_load import load_pipeline
from weft.model.diffusion.diffusers_pipeline import DiffusersImage, DiffusersPipeline, kept_bytes, unit_costs
from weft.model.diffusion.pipeline import KEPT_STATES
from weft.payloads import NO_CONDITIONING, Conditioning, InfoEntry, PromptEmbeds
from weft.payloads import Tensor as ClientTensor
from weft.plan import DenoiseAdmission, PlacedEmbeds
from weft.types import ImageParams

if importlib.util.find_spec("diffusers") is None:
    pytest.skip("diffusers is not installed", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
PROMPTS = ["a red cat on the mat", "the blue dog", "a cat and a dog of the mat"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pipelines")
    return {name: save_pipeline(name, root / name) for name in MAKERS}


@pytest.fixture(scope="module")
def pipelines(folders: dict[str, Path]) -> dict[str, DiffusersPipeline]:
    return {name: pipeline_of(folder) for name, folder in folders.items()}


def pipeline_of(folder: Path, num_slots: int = 4) -> DiffusersPipeline:
    return DiffusersPipeline(load_pipeline(folder, dtype=torch.float32, device=CPU), num_slots)


def asked(text: str = PROMPTS[0], **changes: Any) -> ImageParams:
    return ImageParams(
        **({"width": 1, "height": 1, "steps": 5, "guidance_scale": 3.5, "seed": 9, "prompt_text": text} | changes)
    )


def begun(
    pipeline: DiffusersPipeline, image: ImageParams, slot: int = 0, conditioning: Conditioning = NO_CONDITIONING
) -> tuple[DiffusersImage, Tensor]:
    drawing, noise = pipeline.prepare(
        DenoiseAdmission(slot, image, PlacedEmbeds(), PlacedEmbeds(), conditioning=conditioning)
    )
    for number, embeds in enumerate((conditioning.prompt, conditioning.negative)[: image.passes]):
        if embeds is None:
            pipeline.encode(drawing, number)
    return drawing, noise.unsqueeze(0)


@torch.inference_mode()
def drawn(pipeline: DiffusersPipeline, image: ImageParams, conditioning: Conditioning = NO_CONDITIONING) -> Tensor:
    drawing, latents = begun(pipeline, image, conditioning=conditioning)
    for step in range(image.steps):
        latents = pipeline.denoise_step(latents, [drawing], [step], 1)
    return pipeline.decode(latents)


def drawn_by_diffusers(
    folder: Path, name: str, image: ImageParams, options: dict[str, Any] | None = None, **parts: None
) -> Tensor:
    import diffusers  # Seconds, for the one worker that runs this file.

    pipeline = getattr(diffusers, name).from_pretrained(folder, use_safetensors=True, local_files_only=True, **parts)
    pipeline.set_progress_bar_config(disable=True)
    config = pipeline.transformer.config
    own = {} if name == "StableDiffusion3Pipeline" else {"use_resolution_binning": False, "clean_caption": False}
    usual = {
        "prompt": image.prompt_text,
        "negative_prompt": image.negative_text,
        "num_inference_steps": image.steps,
        "guidance_scale": image.guidance_scale,
        "latents": flow.noise(image.seed, (config.in_channels, config.sample_size, config.sample_size))[None],
        "output_type": "pt",
    }
    return pipeline(**own | usual | (options or {})).images


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("changes", [{}, {"negative_text": PROMPTS[1], "steps": 7}, {"guidance_scale": 1.0}], ids=str)
def test_an_image_is_what_the_library_makes(
    folders: dict[str, Path], pipelines: dict[str, DiffusersPipeline], name: str, changes: dict[str, Any]
) -> None:
    image = asked(**changes)
    expected = drawn_by_diffusers(folders[name], name, image)
    got = (drawn(pipelines[name], image) / 2 + 0.5).clamp(0, 1)
    assert got.shape == expected.shape and expected.std() > 0.05
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


def sent(tensor: Tensor) -> ClientTensor:
    return ClientTensor(data=memoryview(tensor.numpy().tobytes()), shape=tuple(tensor.shape), dtype="float32")


@pytest.mark.parametrize("name", MAKERS)
def test_latents_and_a_schedule_of_a_client_are_what_the_library_makes_of_them(
    folders: dict[str, Path], pipelines: dict[str, DiffusersPipeline], name: str
) -> None:
    image = asked(steps=4)
    key, values = ("sigmas", [1.0, 0.6, 0.5, 0.1]) if "Stable" in name else ("timesteps", [900, 600, 333, 2])
    latents = flow.noise(77, pipelines[name].latent_shape)
    information = {key: InfoEntry(values=values), "latents": InfoEntry(tensor=sent(latents))}
    conditioning = Conditioning(information=information)
    conditioning.check(pipelines[name].family.inputs, steps=4)
    expected = drawn_by_diffusers(folders[name], name, image, {key: values, "latents": latents[None]})
    got = (drawn(pipelines[name], image, conditioning) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
    assert (drawn(pipelines[name], image) / 2 + 0.5 - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", MAKERS)
def test_prompt_embeds_of_a_client_are_a_prompt(pipelines: dict[str, DiffusersPipeline], name: str) -> None:
    """In the shape that the pipeline declares: PixArt's have as many rows as tokens, Stable Diffusion 3's all, and a
    pooled vector."""
    pipeline, image = pipelines[name], asked(steps=2, negative_text=PROMPTS[1])
    encoded = [pipeline.family.encode(text) for text in (image.prompt_text, image.negative_text)]
    states = [one["encoder_hidden_states"][0] for one in encoded]
    if "Stable" in name:
        names = ("pooled_prompt_embeds", "negative_pooled_prompt_embeds")
        information = {
            key: InfoEntry(tensor=sent(one["pooled_projections"][0])) for key, one in zip(names, encoded, strict=True)
        }
    else:
        states = [each[: int(one["encoder_attention_mask"].sum())] for each, one in zip(states, encoded, strict=True)]
        information = {}
    prompt, negative = (PromptEmbeds(**asdict(sent(each))) for each in states)
    conditioning = Conditioning(prompt=prompt, negative=negative, information=information)
    conditioning.check(pipeline.family.inputs, steps=2)
    assert torch.equal(
        drawn(pipeline, replace(image, prompt_text="", negative_text=""), conditioning), drawn(pipeline, image)
    )
    if information:
        with pytest.raises(InvalidRequest, match="needs pooled_prompt_embeds with it"):
            Conditioning(prompt=prompt).check(pipeline.family.inputs, steps=2)
        with pytest.raises(InvalidRequest, match=f"takes {len(states[0])} rows"):
            fewer = PromptEmbeds(**asdict(sent(states[0][:-1])))
            replace(conditioning, prompt=fewer).check(pipeline.family.inputs, steps=2)


def test_costs_are_the_operations_of_a_text_encoder_and_a_vae_in_tokens_of_the_transformer(
    pipelines: dict[str, DiffusersPipeline],
) -> None:
    family = pipelines["PixArtSigmaPipeline"].family
    encoder, vae = family.pipeline.text_encoder, family.vae
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        family.encode("a cat")
        family.predict(torch.zeros(1, *family.latent_shape), torch.zeros(1), family.blank)
        vae.decode(torch.zeros(1, *family.latent_shape))
    counted = {name: sum(flops.values()) for name, flops in counter.get_flop_counts().items()}
    a_token = counted[type(family.transformer).__name__] / family.num_tokens
    expected = [math.ceil(counted[type(model).__name__] / a_token) for model in (encoder, vae.decoder)]
    got = unit_costs(family)
    assert got[0] == expected[0] > 0 and expected[1] <= got[1] <= expected[1] + 1, "a VAE has a layer of its own"


@pytest.mark.parametrize("name", MAKERS)
def test_both_prompts_are_read(pipelines: dict[str, DiffusersPipeline], name: str) -> None:
    image = asked(steps=2)
    first, *others = (
        drawn(pipelines[name], one)
        for one in (image, replace(image, prompt_text=PROMPTS[1]), replace(image, negative_text=PROMPTS[1]))
    )
    assert all((other - first).abs().max() > 1e-3 for other in others)


@pytest.mark.parametrize("name", MAKERS)
@torch.inference_mode()
def test_images_at_different_steps_in_one_batch_are_those_drawn_alone(
    pipelines: dict[str, DiffusersPipeline], name: str
) -> None:
    pipeline = pipelines[name]
    images = [
        asked(PROMPTS[i], steps=4 + i, seed=i, guidance_scale=2.0 + i, negative_text=PROMPTS[-i]) for i in (0, 1, 2)
    ]
    alone = [drawn(pipeline, image) for image in images]
    drawings, latents = zip(*(begun(pipeline, image, slot) for slot, image in enumerate(images)), strict=True)
    at, finished = [0, 0, 0], list(latents)
    for number in range(8):
        # Each begins a step after the one before it.
        able = [i for i, image in enumerate(images) if i <= number and at[i] < image.steps]
        moved = pipeline.denoise_step(
            torch.cat([finished[i] for i in able]), [drawings[i] for i in able], [at[i] for i in able], 1
        )
        for i, latent in zip(able, torch.split(moved, 1), strict=True):
            finished[i], at[i] = latent, at[i] + 1
    assert at == [image.steps for image in images]
    for latent, expected in zip(finished, alone, strict=True):
        torch.testing.assert_close(pipeline.decode(latent), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", MAKERS)
@torch.inference_mode()
def test_steps_that_were_taken_back_are_made_again(pipelines: dict[str, DiffusersPipeline], name: str) -> None:
    """Whatever the scheduler remembered of them is forgotten."""
    pipeline, image = pipelines[name], asked(steps=7)
    drawing, noise = begun(pipeline, image)
    latents = [noise]
    for step in (0, 1, 2, 1, 2, 3, 4, 4, 5, 4, 5, 6):
        assert len(latents) - step <= KEPT_STATES
        del latents[step + 1 :]
        latents.append(pipeline.denoise_step(latents[step], [drawing], [step], 1))
    assert torch.equal(pipeline.decode(latents[-1]), drawn(pipeline, image))


@pytest.mark.parametrize("name", MAKERS)
def test_a_new_engine_draws_the_same_bits(
    folders: dict[str, Path], pipelines: dict[str, DiffusersPipeline], name: str
) -> None:
    assert torch.equal(drawn(pipeline_of(folders[name]), asked()), drawn(pipelines[name], asked()))


@pytest.mark.parametrize("name", MAKERS)
@torch.inference_mode()
def test_all_steps_at_once_and_once_more(pipelines: dict[str, DiffusersPipeline], name: str) -> None:
    pipeline, image = pipelines[name], asked()
    drawing, noise = begun(pipeline, image)
    for _ in range(2):
        assert torch.equal(
            pipeline.decode(pipeline.denoise_step(noise, [drawing], [0], image.steps)), drawn(pipeline, image)
        )


def test_a_solver_of_a_higher_order_remembers_as_much_as_it_needs(tmp_path: Path) -> None:
    name = "PixArtSigmaPipeline"
    folder = save_pipeline(name, tmp_path / name, solver_order=3)
    image = asked(steps=17)
    got = (drawn(pipeline_of(folder), image) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(got, drawn_by_diffusers(folder, name, image), atol=2e-5, rtol=0)


def test_shifts_that_depend_on_the_size(tmp_path: Path) -> None:
    name = "StableDiffusion3Pipeline"
    folder = save_pipeline(name, tmp_path / name, use_dynamic_shifting=True)
    got = (drawn(pipeline_of(folder), asked()) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(got, drawn_by_diffusers(folder, name, asked()), atol=2e-5, rtol=0)


def test_memory_is_counted(pipelines: dict[str, DiffusersPipeline], folders: dict[str, Path]) -> None:
    family = load_pipeline(folders["PixArtSigmaPipeline"], dtype=torch.float32, device=CPU)
    texts, latents = 300 * 32 * 4 + 300 * 8, 4 * 8 * 8 * 4
    assert kept_bytes(family) == 2 * texts + 4 * latents, "two outputs of the transformer before each of three states"
    models = [family.transformer, family.vae, family.pipeline.text_encoder]
    weights = sum(weight.numel() * 4 for model in models for weight in model.parameters())
    assert pipelines["PixArtSigmaPipeline"].num_bytes == weights + 4 * 2 * texts
    assert (family.image_size, family.num_tokens, family.latent_shape) == (16, 16, (4, 8, 8))


# What is not loaded.


def changed(folder: Path, target: Path, file: str, **changes: Any) -> Path:
    """A copy by links, with changes to one of its JSON files."""
    for path in folder.rglob("*"):
        if path.is_file():
            there = target / path.relative_to(folder)
            there.parent.mkdir(parents=True, exist_ok=True)
            there.symlink_to(path)
    content = json.loads((target / file).read_text()) | changes
    (target / file).unlink()
    (target / file).write_text(json.dumps(content))
    return target


def load_changed(folder: Path, target: Path, file: str, **changes: Any) -> None:
    load_pipeline(changed(folder, target, file, **changes), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("name", ["FluxPipeline", ["custom", "PixArtSigmaPipeline"], None])
def test_an_unknown_class_is_refused_with_those_that_are_known(
    folders: dict[str, Path], tmp_path: Path, name: Any
) -> None:
    with pytest.raises(ConfigError, match="are not supported") as raised:
        load_changed(folders["PixArtSigmaPipeline"], tmp_path / "p", "model_index.json", _class_name=name)
    assert all(known in raised.value.hint for known in MAKERS)


@pytest.mark.parametrize(
    "part",
    [
        {"vae": ["diffusers", "AutoencoderTiny"]},
        {"transformer": ["subprocess", "Popen"]},
        {"tokenizer": ["transformers", "AutoTokenizer"]},
        {"scheduler": ["diffusers", "LCMScheduler"]},
        {"text_encoder": [None, None]},
        {"text_encoder": None},
    ],
    ids=str,
)
def test_parts_of_other_classes_are_refused(folders: dict[str, Path], tmp_path: Path, part: dict[str, Any]) -> None:
    (name,) = part
    with pytest.raises(ModelError, match=f"{name} is .* it must be one of"):
        load_changed(folders["PixArtSigmaPipeline"], tmp_path / "p", "model_index.json", **part)


def test_the_largest_text_encoder_may_be_left_out(folders: dict[str, Path], tmp_path: Path) -> None:
    name, left_out = "StableDiffusion3Pipeline", ("text_encoder_3", "tokenizer_3")
    folder = changed(folders[name], tmp_path / "p", "model_index.json", **{part: [None, None] for part in left_out})
    got = (drawn(pipeline_of(folder), asked()) / 2 + 0.5).clamp(0, 1)
    expected = drawn_by_diffusers(folder, name, asked(), **dict.fromkeys(left_out))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("PixArtSigmaPipeline", {"algorithm_type": "sde-dpmsolver++"}),
        ("StableDiffusion3Pipeline", {"stochastic_sampling": True}),
    ],
)
def test_steps_that_add_noise_are_refused(
    folders: dict[str, Path], tmp_path: Path, name: str, setting: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match="could not be generated again"):
        load_changed(folders[name], tmp_path / "p", "scheduler/scheduler_config.json", **setting)


def test_weights_in_other_formats_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["PixArtSigmaPipeline"], tmp_path / "p", "model_index.json")
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(ModelError, match="cannot be loaded as a PixArtTransformer2DModel"):
        load_pipeline(folder, dtype=torch.float32, device=CPU)


def test_weights_that_are_missing_are_not_made_up(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no .* among the weights of a PixArtTransformer2DModel"):
        load_changed(folders["PixArtSigmaPipeline"], tmp_path / "p", "transformer/config.json", num_layers=3)


def test_a_prompt_that_is_too_long_is_not_logged(
    pipelines: dict[str, DiffusersPipeline], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for pipeline in pipelines.values():
        drawn(pipeline, asked(" ".join(["cat"] * 400), steps=1))
    captured = capfd.readouterr()
    assert "cat" not in captured.out + captured.err + caplog.text
