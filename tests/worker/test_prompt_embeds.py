"""Texts of images in a real worker: encoded once, drawn from by many, and put there by clients to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from tests.text.grammars.grammar_maker import grammars
from tests.tiny_images import save_image_model
from tests.tiny_models import END_OF_TURN, VOCAB_SIZE, tokenizer_json
from tests.worker.driving import Driven, load, request, run
from tests.worker.test_denoise import TEXTS, WIDTH, assert_as_alone, image, images
from weft.hub.resolve import resolve
from weft.options import Config, LimitOptions, ModelOptions, SchedulerOptions
from weft.payloads import Conditioning, PromptEmbeds
from weft.plan import KeptHiddenStates
from weft.text.grammars.specs import RegexSpec, vocabulary_of
from weft.text.tokenizer import Tokenizer
from weft.types import FinishReason, Request, TextAssets
from weft.worker.diffusion.denoiser import PromptEmbedsTable
from weft.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("one_thread")

P, N = TEXTS[0], TEXTS[2]


@pytest.fixture(scope="module")
def driven(tiny_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Driven:
    folder = save_image_model(tmp_path_factory.mktemp("images") / "dit", WIDTH)
    return load(tiny_directory("smollm2"), num_blocks=256, image_model=folder)


@pytest.fixture(scope="module")
def solo(driven: Driven) -> dict[str, dict[int, bytes]]:
    return {one.request_id: run(driven, [one]).outputs[one.request_id].images for one in images()}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """What the model makes of prompts, in the order in which they come."""
    states: list[Tensor] = []
    hold = PromptEmbedsTable.keep

    def watching(table: PromptEmbedsTable, held: KeptHiddenStates, start: int, found: Tensor) -> None:
        states.append(found.clone())
        hold(table, held, start, found)

    monkeypatch.setattr(PromptEmbedsTable, "keep", watching)
    yield states


def embeds(states: Tensor, dtype: str = "float32") -> PromptEmbeds:
    values = states.to(getattr(torch, dtype)).view({"float32": torch.int32}.get(dtype, torch.int16))
    return PromptEmbeds(data=memoryview(values.numpy().tobytes()), shape=tuple(states.shape), dtype=dtype)


def given(asked: Request, **texts: PromptEmbeds) -> Request:
    """The same image, drawn from tensors instead of prompts."""
    without = asked.image if "negative" not in texts else replace(asked.image, negative_token_ids=[])
    prompt = [] if "prompt" in texts else asked.prompt_token_ids
    return replace(asked, prompt_token_ids=prompt, image=without, conditioning=Conditioning(**texts))


def pictures(driven: Driven, *asked: Request, **limits: Any) -> list[dict[int, bytes]]:
    outcome = run(driven, asked, **limits)
    assert all(output.finish is FinishReason.STOP for output in outcome.outputs.values())
    return [outcome.outputs[one.request_id].images for one in asked]


def test_four_images_of_a_prompt_encode_it_once(driven: Driven) -> None:
    asked = [image(f"i{i}", P, negative_token_ids=N, seed=i) for i in range(4)]
    outcome = run(driven, asked)
    assert outcome.stats.computed_tokens == len(P) + len(N)
    for one in asked:
        assert outcome.outputs[one.request_id].images == pictures(driven, one)[0]


def test_an_image_from_its_prompts_states_has_the_bits_of_the_image_from_the_prompt(
    driven: Driven, held: list[Tensor]
) -> None:
    asked = image("i", P, negative_token_ids=TEXTS[1], preview_every=1)
    [expected] = pictures(driven, asked)
    prompt, negative = held
    assert len(prompt) == len(P) and len(negative) == len(TEXTS[1])
    for texts in (
        {"prompt": embeds(prompt)},
        {"negative": embeds(negative)},
        {"prompt": embeds(prompt), "negative": embeds(negative)},
    ):
        held.clear()
        assert pictures(driven, given(asked, **texts)) == [expected]
        assert len(held) == 2 - len(texts), "a prompt was encoded that nobody asked for"
    other = given(asked, prompt=embeds(-prompt))
    assert pictures(driven, other) != [expected], "the tensor means nothing"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_smaller_types_are_the_values_that_they_stand_for(driven: Driven, held: list[Tensor], dtype: str) -> None:
    asked = image("i", P)
    pictures(driven, asked)
    rounded = held[0].to(getattr(torch, dtype))
    small, large = embeds(held[0], dtype), embeds(rounded.float())
    assert pictures(driven, given(asked, prompt=small)) == pictures(driven, given(asked, prompt=large))


@pytest.mark.parametrize("overlap", [False, True])
def test_in_company_and_in_slots_that_others_had(
    driven: Driven, solo: dict[str, dict[int, bytes]], overlap: bool
) -> None:
    """Two images at a time and four texts: every slot is used again, by longer texts and by shorter ones."""
    rng = np.random.default_rng(3)
    tensors = [torch.from_numpy(rng.standard_normal((n, WIDTH), dtype=np.float32)) for n in (24, 1, 7)]
    from_tensors = [image(f"t{i}", [], seed=20 + i) for i in range(3)]
    from_tensors = [given(one, prompt=embeds(states)) for one, states in zip(from_tensors, tensors, strict=True)]
    alone = [pictures(driven, one)[0] for one in from_tensors]
    few = replace(driven.limits.image, max_num_images=2, max_num_embeds=4)
    later = [(2 * i, one) for i, one in enumerate(images())]
    outcome = run(driven, from_tensors, later=later, overlap=overlap, image=few)
    assert_as_alone(outcome, solo)
    assert [outcome.outputs[one.request_id].images for one in from_tensors] == alone
    assert outcome.stats.embedding_bytes == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_without_memory_change_no_image(
    driven: Driven, held: list[Tensor], overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [image(f"i{i}", P, seed=i) for i in range(3)]
    expected = [pictures(driven, one)[0] for one in asked]
    states = held[0]
    put, calls = PromptEmbedsTable.put, iter(range(10**6))

    def poor(table: PromptEmbedsTable, slot: int, tensor: PromptEmbeds) -> None:
        put(table, slot, tensor)
        if next(calls) == 1:
            raise torch.OutOfMemoryError("the test took it all")

    monkeypatch.setattr(PromptEmbedsTable, "put", poor)
    assert pictures(driven, *(given(one, prompt=embeds(states)) for one in asked), overlap=overlap) == expected
    assert next(calls) == 2 + 3, "what was taken back was not put there again"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_chat_with_a_grammar_beside_images_is_as_it_is_alone(
    driven: Driven, solo: dict[str, dict[int, bytes]], overlap: bool
) -> None:
    tokenizer = Tokenizer.from_assets(
        TextAssets(kind="json", tokenizer_json=tokenizer_json(), eos_token_ids=[END_OF_TURN])
    )
    words = vocabulary_of(tokenizer)
    driven.runner.constraints.learn(words.tokens, words.special_ids, words.eos_token_ids, VOCAB_SIZE)
    [grammar] = grammars(tokenizer, [RegexSpec(pattern="([a-z]{2,4}[0-9] ){6}")])
    chats = [
        replace(request(f"c{i}", [5, 9, i], 60, grammar=grammar, temperature=i, seed=i), stop_token_ids=[END_OF_TURN])
        for i in range(2)
    ]
    alone = [run(driven, [chat]).tokens(chat.request_id) for chat in chats]
    outcome = run(driven, [*images(), *chats], overlap=overlap)
    assert [outcome.tokens(chat.request_id) for chat in chats] == alone
    assert all(len(tokens) > 5 and tokens[-1] == END_OF_TURN for tokens in alone)
    assert_as_alone(outcome, solo)


def test_there_is_room_for_the_tensors_of_an_image_where_they_are_allowed(
    tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    files, folder = resolve(str(tiny_directory("smollm2"))), save_image_model(tmp_path / "dit", WIDTH)

    def limits(allowed: bool) -> Any:
        config = Config(
            ModelOptions(device="cpu", image_model=str(folder), max_model_len=64),
            scheduler=SchedulerOptions(max_num_images=100, max_embedding_mb=1),
            limits=LimitOptions(allow_prompt_embeds=allowed),
        )
        worker = Worker(config, files)
        info = worker.info.images
        assert info is not None and info.inputs["prompt_embeds"].shape == (24, WIDTH)
        assert list(info.inputs) == ["prompt_embeds", "negative_prompt_embeds", "latents", "sigmas"]
        return worker.limits.image

    largest = 2 * 24 * WIDTH * 4
    assert limits(allowed=False).max_num_images == 18
    of_images = limits(allowed=True)
    assert of_images.max_num_images == 17 and of_images.max_client_bytes >= largest
    assert of_images.max_num_embeds == 34
