"""LLM.draw and LLM.generate take tensors where they are allowed, as the endpoints do."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.api.scripted_engine import PAINTER, ScriptedEngine
from weft import LLM, SamplingParams, llm
from weft.errors import InvalidRequest
from weft.payloads import AdditionalInformation, Conditioning, InfoEntry, PromptEmbeds
from weft.types import MixedPrompt

TENSOR = PromptEmbeds(data=memoryview(struct.pack("<4f", 1, 2, 3, 4)), shape=(2, 2), dtype="float32")
NEGATIVE = AdditionalInformation(entries={"negative_prompt_embeds": InfoEntry(tensor=TENSOR)})


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    engine = ScriptedEngine(images=PAINTER, embeds_width=2)

    async def start(*_: Any) -> ScriptedEngine:
        return engine

    monkeypatch.setattr(llm, "start_engine", start)
    return engine


def test_an_image_is_drawn_from_tensors(engine: ScriptedEngine) -> None:
    with LLM("smollm2", allow_prompt_embeds=True) as model:
        model.draw(prompt_embeds=TENSOR, additional_information=NEGATIVE, steps=2)
        with pytest.raises(InvalidRequest, match="give either"):
            model.draw("a", prompt_embeds=TENSOR)
        with pytest.raises(InvalidRequest, match="1 to 4000"):
            model.draw()
    [drawn] = engine.drawn
    assert (drawn.prompt, drawn.conditioning) == ([], Conditioning(prompt=TENSOR, negative=TENSOR))


def test_it_must_be_allowed(engine: ScriptedEngine) -> None:
    with LLM("smollm2") as model:
        for given in ({"prompt_embeds": TENSOR}, {"additional_information": NEGATIVE}):
            with pytest.raises(InvalidRequest, match="--allow-prompt-embeds"):
                model.draw(**given)
    assert not engine.drawn


ROWS = np.array([[1, 2], [3, 4]], dtype=np.float32)


def test_rows_are_prompts_and_stand_among_token_ids(engine: ScriptedEngine) -> None:
    with LLM("smollm2", allow_prompt_embeds=True) as model:
        for prompts in (ROWS, TENSOR, [ROWS, TENSOR], [5, ROWS, 6], [ROWS, 6], [[5, TENSOR], [7]]):
            model.generate(prompts)
        with pytest.raises(InvalidRequest, match="rows have 2 values") as refused:
            model.generate([5, ROWS[:, :1]])
        assert refused.value.param == "prompt[1].shape"
        with pytest.raises(InvalidRequest, match=r"float64.*possible are float32"):
            model.generate(ROWS.astype(np.float64))
        with pytest.raises(InvalidRequest, match="'two' is not a token id"):
            model.generate([5, ROWS, "two"])

    def shown(prompt: Any) -> list[Any]:
        parts = prompt.parts() if isinstance(prompt, MixedPrompt) else [prompt]
        return [part if isinstance(part, list) else "rows" for part in parts]

    whole = ["rows"]
    sent = [shown(submitted.prompt) for submitted in engine.submitted]
    assert sent == [whole, whole, whole, whole, [[5], *whole, [6]], [*whole, [6]], [[5], *whole], [[7]]]
    first, second = [submitted.prompt for submitted in engine.submitted[:2]]
    assert isinstance(first, MixedPrompt) and isinstance(second, MixedPrompt)
    assert first.embeds[0].digests == second.embeds[0].digests, "an array and the struct of it are one"


def test_rows_must_be_allowed(engine: ScriptedEngine) -> None:
    with LLM("smollm2") as model, pytest.raises(InvalidRequest, match="--allow-prompt-embeds"):
        model.generate(ROWS)
    assert not engine.submitted


def test_the_embeddings_of_a_text_are_the_text(tiny_model: Path) -> None:
    table = load_file(tiny_model / "model.safetensors")["model.embed_tokens.weight"]
    ids = [(5 * i) % 200 + 3 for i in range(40)]
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    settings = {"num_blocks": 64, "max_model_len": 256, "threads": 1}
    with LLM(str(tiny_model), allow_prompt_embeds=True, **settings) as model:
        plain, *others = model.generate([ids, table[ids], [*ids[:9], table[ids[9:30]], *ids[30:]]], greedy)
        assert [other.token_ids for other in others] == [plain.token_ids] * 2
        assert [other.usage.prompt_tokens for other in others] == [40, 40]
        [streamed] = ["".join(output.text for output in model.stream(table[ids], greedy))]
        assert streamed == plain.text
