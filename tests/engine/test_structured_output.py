"""Structured output from a request to its text: what every endpoint gives is made of this. The default model keeps to
schemas; what does not depend on the model is tried with the tiny one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from tests.engine.test_supervision import answer, serving, until
from tests.text.grammars.schemas import FOR_A_MODEL, SCHEMAS
from weft.backends.native import NativeEngine
from weft.checkpoint.model_files import ModelFiles
from weft.engine.process import EngineThread
from weft.hub.resolve import resolve
from weft.text.grammars.compiler import GrammarCompiler
from weft.text.grammars.specs import ChoiceSpec, JsonObjectSpec, JsonSchemaSpec, LarkSpec, RegexSpec
from weft.types import FinishReason, SamplingParams

QUESTION = "Describe somebody you know, in JSON."
FREE = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LONG = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": 4,
    "maxItems": 4,
}


@pytest.fixture
def tiny_files(tiny_model: Path) -> ModelFiles:
    return resolve(str(tiny_model))


@asynccontextmanager
async def constrained(files: ModelFiles, **settings: object) -> AsyncIterator[tuple[NativeEngine, GrammarCompiler]]:
    async with serving(files, **settings) as engine:
        compiler = GrammarCompiler(engine.text.tokenizer)
        try:
            yield engine, compiler
        finally:
            await compiler.close()


def params(grammar: str, *, seed: int = 0, temperature: float = 1.0, max_tokens: int = 450) -> SamplingParams:
    return SamplingParams(grammar=grammar, seed=seed, temperature=temperature, max_tokens=max_tokens)


def prompt(engine: NativeEngine) -> list[int]:
    return engine.text.encode_chat([{"role": "user", "content": QUESTION}]).token_ids


def loads_llguidance(engine: NativeEngine) -> bool:
    return "llguidance" in Path(f"/proc/{engine.client.engine_pid}/maps").read_text()


def test_a_models_answers_fit_their_schemas(smollm2_files: ModelFiles) -> None:
    async def scenario() -> None:
        async with constrained(smollm2_files, launch=EngineThread) as (engine, compiler):
            grammars = [await compiler.compile(JsonSchemaSpec(schema=SCHEMAS[name])) for name in FOR_A_MODEL]
            # Each greedily or at random: what a grammar allows does not depend on how one of it is chosen.
            asked = [
                (name, params(grammar, seed=i, temperature=i % 2))
                for i, (name, grammar) in enumerate(zip(FOR_A_MODEL, grammars, strict=True))
            ]
            free = asyncio.create_task(answer(engine, prompt(engine), FREE))
            answers = await asyncio.gather(*(answer(engine, prompt(engine), one) for _, one in asked))
            for (name, _), (text, last) in zip(asked, answers, strict=True):
                Draft202012Validator(SCHEMAS[name]).validate(json.loads(text))
                assert last.finish is FinishReason.STOP, name
            beside, _ = await free
            assert beside == (await answer(engine, prompt(engine), FREE))[0]

    asyncio.run(scenario())


def test_every_kind_of_form(tiny_files: ModelFiles) -> None:
    async def scenario() -> None:
        async with constrained(tiny_files) as (engine, compiler):
            await answer(engine, prompt(engine), FREE)
            assert not loads_llguidance(engine), "nobody has asked for a grammar"
            specs = [
                RegexSpec(pattern="[A-Z][a-z]{2,8}, [0-9]{1,2}"),
                ChoiceSpec(options=["yes", "no", "maybe"]),
                LarkSpec(text='start: "Dear " NAME ","\nNAME: /[A-Z][a-z]{1,9}/'),
            ]
            asked = [params(await compiler.compile(spec)) for spec in specs]
            texts = [text for text, _ in await asyncio.gather(*(answer(engine, prompt(engine), one) for one in asked))]
            assert re.fullmatch("[A-Z][a-z]{2,8}, [0-9]{1,2}", texts[0])
            assert texts[1] in ("yes", "no", "maybe")
            assert re.fullmatch("Dear [A-Z][a-z]{1,9},", texts[2])
            text, last = await answer(
                engine, prompt(engine), params(await compiler.compile(JsonObjectSpec()), max_tokens=1)
            )
            assert last.finish is FinishReason.LENGTH and text.startswith("{")
            assert loads_llguidance(engine)

    asyncio.run(scenario())


def test_killed_in_mid_answer_the_whole_answer_still_fits(tiny_files: ModelFiles) -> None:
    async def scenario() -> None:
        async with constrained(tiny_files) as (engine, compiler):
            grammar = await compiler.compile(JsonSchemaSpec(schema=LONG))
            asked = [params(grammar, seed=seed) for seed in range(3)]
            undisturbed = await asyncio.gather(*(answer(engine, prompt(engine), one) for one in asked))
            pid = engine.client.engine_pid
            assert pid is not None
            streams = [asyncio.create_task(answer(engine, prompt(engine), one)) for one in asked]
            generated = engine.stats().generation_tokens
            await until(lambda: engine.stats().generation_tokens > generated + 20)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not engine.health().ready)
            disturbed = await asyncio.gather(*streams)
            await until(lambda: engine.stats().restarts == 1)
            assert [text for text, _ in disturbed] == [text for text, _ in undisturbed]
            for text, last in disturbed:
                Draft202012Validator(LONG).validate(json.loads(text))
                assert last.finish is FinishReason.STOP

    asyncio.run(scenario())


def test_grammars_that_cannot_be_built_or_followed_fail_alone(tiny_files: ModelFiles) -> None:
    """Nothing else checks a grammar that came past the compiler. One may be built, and be too ambiguous later."""
    wide = "start: a\na: " + " | ".join(f'"{{" b{i}' for i in range(3000))
    wide += "".join(f'\nb{i}: "x{i}"' for i in range(3000))

    async def scenario() -> None:
        async with serving(tiny_files, EngineThread) as engine:
            asked = [FREE, params("start: nobody"), params(wide)]
            results = await asyncio.gather(*(answer(engine, prompt(engine), one) for one in asked))
            (text, fine), (_, unbuilt), (_, lost) = results
            assert unbuilt.finish is FinishReason.REJECTED and "nobody" in unbuilt.error
            assert lost.finish is FinishReason.ERROR and "grammar" in lost.error
            assert fine.finish is FinishReason.LENGTH and text

    asyncio.run(scenario())
