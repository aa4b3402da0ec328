"""Requests that leave out sampling parameters get what the model's own files recommend."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.api.grpc.calls import answer_to, ask, served
from tests.api.http import HELLO, PROMPT, post
from tests.api.scripted_engine import ScriptedEngine
from tests.tiny_models import save_directory, save_gguf
from weft import LLM
from weft.backends.model_text import ModelText, open_model_text
from weft.checkpoint.model_files import ModelFiles, model_at
from weft.errors import ModelError
from weft.options import ModelOptions
from weft.types import GenerationRequest, ModelInfo, Sample, SamplingDefaults, SamplingParams

RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_directory("llama2", tmp_path / "model")


def recommend(model: Path, **sampling: Any) -> None:
    file = model / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | sampling))


def text_of(files: ModelFiles, generation_config: str = "auto") -> ModelText:
    text = open_model_text(files, ModelOptions(generation_config=generation_config))  # type: ignore[arg-type]
    text.close()
    return text


def test_generation_config_json_is_honoured(model: Path) -> None:
    assert text_of(model_at(model)).sampling_defaults == SamplingDefaults()
    recommend(model, **RECOMMENDED, max_new_tokens=64, do_sample=True, typical_p=None)
    assert text_of(model_at(model)).sampling_defaults == SamplingDefaults(**RECOMMENDED, max_tokens=64)


@pytest.mark.parametrize("word", ["none", "vllm"])
def test_it_can_be_turned_off(model: Path, word: str) -> None:
    recommend(model, **RECOMMENDED)
    assert text_of(model_at(model), word).sampling_defaults == SamplingDefaults()


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_p": 7}, {"max_new_tokens": 0}])
def test_what_no_request_could_ask_for_is_told_with_the_way_out(model: Path, wrong: dict[str, Any]) -> None:
    recommend(model, **wrong)
    with pytest.raises(ModelError) as refused:
        text_of(model_at(model))
    assert "--generation-config none" in refused.value.hint
    assert text_of(model_at(model), "none").sampling_defaults == SamplingDefaults()


def test_the_metadata_of_a_gguf_file_is_honoured(tmp_path: Path) -> None:
    metadata = {
        "general.sampling.temp": 0.5,
        "general.sampling.top_p": 0.25,
        "general.sampling.top_k": 40,
        "general.sampling.min_p": 0.125,
        "general.sampling.penalty_repeat": 1.5,
    }
    files = model_at(save_gguf("llama2", tmp_path / "tiny.gguf", sampling=metadata))
    assert text_of(files).sampling_defaults == SamplingDefaults(
        temperature=0.5, top_p=0.25, top_k=40, min_p=0.125, repetition_penalty=1.5
    )
    catalogued = replace(files, sampling={"temperature": 0.9, "top_p": 0.9})
    assert text_of(catalogued).sampling_defaults.temperature == 0.5, "the file knows better than the catalogue"


def test_the_default_model_has_defaults_at_which_it_makes_sense(smollm2_files: ModelFiles) -> None:
    assert text_of(smollm2_files).sampling_defaults == SamplingDefaults(temperature=0.2, top_p=0.9)


def test_the_usual_length_ends_with_the_context_and_gives_way_to_what_is_asked(model: Path) -> None:
    recommend(model, max_new_tokens=64)
    text = text_of(model_at(model))
    info = ModelInfo(
        name="m", max_model_len=100, logits_width=96, num_blocks=9, block_size=16, device="cpu", dtype="float32"
    )

    def longest(prompt: int, **asked: Any) -> int | None:
        params = SamplingParams(**asked)
        request = GenerationRequest(prompt=[5] * prompt, task=Sample(params=params))
        return text.engine_request(info, request, params).params.max_tokens

    assert [longest(10), longest(90), longest(10, max_tokens=80), longest(10, min_tokens=70)] == [64, 10, 80, 70]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", HELLO),
        ("/v1/completions", PROMPT),
        ("/v1/messages", {**HELLO, "max_tokens": 5}),
        ("/v1/responses", {"model": "scripted", "input": "hi"}),
    ],
)
def test_every_endpoint_takes_the_models_defaults_and_the_requests_own_before_them(
    path: str, body: dict[str, Any]
) -> None:
    engine = ScriptedEngine()
    engine.sampling_defaults = SamplingDefaults(**RECOMMENDED)
    assert post(engine, path, body).status_code == 200
    assert post(engine, path, {**body, "temperature": 0, "top_p": 1, "top_k": 0}).status_code == 200
    assert post(engine, path, {**body, "temperature": None, "top_k": -1}).status_code == 200
    usual, own, null = (request.params for request in engine.submitted)
    assert {name: getattr(usual, name) for name in RECOMMENDED} == RECOMMENDED
    assert (own.temperature, own.top_p, own.top_k, own.min_p) == (0, 1, 0, 0.05)
    assert (null.temperature, null.top_k) == (0.6, 0)


def test_an_answer_of_the_responses_endpoint_tells_what_was_used() -> None:
    engine = ScriptedEngine()
    engine.sampling_defaults = SamplingDefaults(temperature=0.6)
    answer = post(engine, "/v1/responses", {"model": "scripted", "input": "hi", "top_p": 0.5}).json()
    assert (answer["temperature"], answer["top_p"]) == (0.6, 0.5)


def test_grpc_takes_them_too() -> None:
    engine = ScriptedEngine()
    engine.sampling_defaults = SamplingDefaults(**RECOMMENDED)

    async def scenario() -> None:
        async with served(engine) as opened:
            await answer_to(opened, ask())
            await answer_to(opened, ask(generation={"temperature": 0.0}))

    asyncio.run(scenario())
    usual, own = (request.params for request in engine.submitted)
    assert usual == SamplingDefaults(**RECOMMENDED).params()
    assert (own.temperature, own.top_k) == (0, 20)


def test_the_python_api_takes_them_where_no_parameters_are_given(model: Path) -> None:
    recommend(model, temperature=0, max_new_tokens=3)
    with LLM(str(model), image_model="none", num_blocks=32, threads=1) as llm:
        usual, again = llm.generate(["The weft", "The weft"])
        greedy, own = llm.generate(
            ["The weft"] * 2, [SamplingParams(temperature=0, max_tokens=3), SamplingParams(max_tokens=5)]
        )
    assert usual.token_ids == again.token_ids == greedy.token_ids and len(usual.token_ids) == 3
    assert len(own.token_ids) <= 5
