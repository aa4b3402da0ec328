"""LLM.draw takes tensors where they are allowed, as the endpoints do."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from tests.api.scripted_engine import PAINTER, ScriptedEngine
from weft import LLM, llm
from weft.errors import InvalidRequest
from weft.payloads import AdditionalInformation, GivenTexts, InfoEntry, PromptEmbeds

TENSOR = PromptEmbeds(data=memoryview(struct.pack("<4f", 1, 2, 3, 4)), shape=(2, 2), dtype="float32")
NEGATIVE = AdditionalInformation(entries={"negative_prompt_embeds": InfoEntry(tensor=TENSOR)})


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    engine = ScriptedEngine(images=PAINTER)

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
    assert (drawn.prompt, drawn.given) == ([], GivenTexts(prompt=TENSOR, negative=TENSOR))


def test_it_must_be_allowed(engine: ScriptedEngine) -> None:
    with LLM("smollm2") as model:
        for given in ({"prompt_embeds": TENSOR}, {"additional_information": NEGATIVE}):
            with pytest.raises(InvalidRequest, match="--allow-prompt-embeds"):
                model.draw(**given)
    assert not engine.drawn
