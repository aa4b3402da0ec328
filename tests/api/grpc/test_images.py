"""GenerateImage: what is asked, what the engine is told, what comes back, and how it ends."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import grpc
import pytest

from tests.api.grpc.calls import Client, failed, refused, served
from tests.api.openai.pixels import pixels_of
from tests.api.scripted_engine import PAINTER, ScriptedEngine, Step, forever, picture
from tests.waiting import until
from weft.api.grpc.ai_service_pb2 import (
    ClientTensor,
    GenerateImageRequest,
    GenerateImageUpdate,
    InformationEntry,
    InformationValue,
    InformationValues,
)
from weft.errors import Overloaded, Unavailable
from weft.types import FinishReason, ImageParams, Output

GENERATE_IMAGE = "/cy.llm.AiInference/GenerateImage"
Code = grpc.StatusCode


def painter(script: list[Step] | None = None) -> ScriptedEngine:
    engine = ScriptedEngine(images=PAINTER)
    engine.image_script = script
    return engine


def call(client: Client, **fields: Any) -> Any:
    method = client.channel.unary_stream(
        GENERATE_IMAGE, GenerateImageRequest.SerializeToString, GenerateImageUpdate.FromString
    )
    return method(GenerateImageRequest(**{"prompt": "a", **fields}))


def draw(engine: ScriptedEngine, **fields: Any) -> list[GenerateImageUpdate]:
    async def scenario() -> list[GenerateImageUpdate]:
        async with served(engine) as opened:
            return [update async for update in call(opened, **fields)]

    return asyncio.run(scenario())


def refusal(engine: ScriptedEngine, settings: dict[str, Any] | None = None, **fields: Any) -> tuple[Any, str]:
    async def scenario() -> tuple[Any, str]:
        async with served(engine, **settings or {}) as opened:
            return await refused(call(opened, **fields))

    return asyncio.run(scenario())


def test_every_step_and_then_the_image() -> None:
    engine = painter()
    updates = draw(engine, trace_id="t", seed=5, previews=2)
    assert [update.index for update in updates] == list(range(6))
    assert [update.step for update in updates] == [1, 2, 3, 4, 5, 6]
    assert {(update.trace_id, update.steps) for update in updates} == {("t", 6)}
    assert [update.end_of_stream for update in updates] == [False] * 5 + [True]
    assert [bool(update.image) for update in updates] == [False, True, False, True, False, True]
    assert pixels_of(updates[-1].image) == (4, 2, picture(engine.drawn[0].image, 6))
    assert updates[-1].seed == 5
    times = [update.elapsed_ms for update in updates]
    assert times[0] > 0 and times == sorted(times)


def test_what_is_given_counts_and_what_is_not_is_the_models() -> None:
    engine = painter()
    draw(
        engine, model_id="painter", negative_prompt="b", seed=0, steps=3, guidance_scale=0, width=4, height=2,
        sampler="heun", priority=-2,
    )  # fmt: skip
    draw(engine, model_id="default")
    first, second = engine.drawn
    assert first.image == ImageParams(
        width=4, height=2, steps=3, guidance_scale=0.0, seed=0, sampler="heun", negative_token_ids=list(b"b")
    )
    assert first.priority == -2
    assert (second.image.steps, second.image.guidance_scale, second.image.sampler) == (6, 3.0, "euler")


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"prompt": ""}, Code.INVALID_ARGUMENT, "prompt"),
        ({"prompt": "x" * 41}, Code.INVALID_ARGUMENT, "at most 40"),
        ({"steps": 0}, Code.INVALID_ARGUMENT, "num_inference_steps"),
        ({"steps": 2**32 - 1}, Code.INVALID_ARGUMENT, "num_inference_steps"),
        ({"guidance_scale": float("nan")}, Code.INVALID_ARGUMENT, "guidance_scale"),
        ({"width": 64, "height": 64}, Code.INVALID_ARGUMENT, "4x2"),
        ({"width": 0}, Code.INVALID_ARGUMENT, "4x2"),
        ({"sampler": "ddim"}, Code.INVALID_ARGUMENT, "euler, heun"),
        ({"previews": 21}, Code.INVALID_ARGUMENT, "0 to 20"),
        ({"trace_id": "t" * 257}, Code.INVALID_ARGUMENT, "trace_id"),
        ({"model_id": "scripted"}, Code.INVALID_ARGUMENT, "'painter'"),
        ({"model_id": "other"}, Code.NOT_FOUND, "'painter'"),
        ({"prompt_embeds": ClientTensor()}, Code.INVALID_ARGUMENT, "--allow-prompt-embeds"),
        ({"additional_information": {"a": InformationEntry()}}, Code.INVALID_ARGUMENT, "--allow-prompt-embeds"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], code: grpc.StatusCode, said: str) -> None:
    engine = painter()
    told, details = refusal(engine, **fields)
    assert told is code
    assert said in details
    assert not engine.drawn


def test_a_model_that_does_not_draw_says_so() -> None:
    code, details = refusal(ScriptedEngine())
    assert code is Code.INVALID_ARGUMENT and "no image model" in details


GOOD = ClientTensor(data=struct.pack("<4f", 1, 2, 3, 4), shape=[2, 2], dtype="float32")
WIDE = ClientTensor(data=struct.pack("<4f", 1, 2, 3, 4), shape=[1, 4], dtype="float32")
NEGATIVE = "negative_prompt_embeds"
MANY_VALUES = InformationValues(values=[InformationValue(truth=True)] * 1025)
VALUES = InformationValues(
    values=[InformationValue(truth=True), InformationValue(integer=1), InformationValue(number=0.5)]
)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt_embeds": GOOD}, "give either that or prompt_embeds"),
        ({"prompt": "", "prompt_embeds": WIDE}, "rows have 2 values"),
        ({"prompt": "", "prompt_embeds": ClientTensor(data=b"1", shape=[2, 2], dtype="float32")}, "ask for 16"),
        ({"prompt": "", "prompt_embeds": ClientTensor(data=b"1", shape=[2], dtype="float32")}, "1 dimensions"),
        (
            {"prompt": "", "prompt_embeds": ClientTensor(shape=[1] * 9)},
            "prompt_embeds.shape: it has 9 dimensions; at most 8",
        ),
        ({"additional_information": {NEGATIVE: InformationEntry(tensor=ClientTensor(shape=[1] * 9))}}, "9 dimensions"),
        ({"additional_information": {NEGATIVE: InformationEntry(values=MANY_VALUES)}}, "1025 values; at most 1024"),
        ({"additional_information": {str(i): InformationEntry() for i in range(101)}}, "101 entries; at most 100"),
        (
            {"additional_information": {"a": InformationEntry(tensor=GOOD)}},
            "it knows latents, negative_prompt_embeds, sigmas",
        ),
        ({"additional_information": {NEGATIVE: InformationEntry(values=VALUES)}}, "takes it as a tensor"),
        ({"additional_information": {NEGATIVE: InformationEntry()}}, "either a tensor or values"),
        ({"additional_information": {NEGATIVE: InformationEntry(tensor=WIDE)}}, "tensor.shape: this model's rows"),
        (
            {"additional_information": {NEGATIVE: InformationEntry(tensor=GOOD)}, "negative_prompt": "b"},
            "give either that or negative_prompt_embeds",
        ),
        (
            {"additional_information": {"a": InformationEntry(values=InformationValues(values=[InformationValue()]))}},
            "a value that is nothing",
        ),
    ],
)
def test_tensors_are_checked_where_they_are_allowed(fields: dict[str, Any], said: str) -> None:
    code, details = refusal(painter(), {"allow_prompt_embeds": True}, **fields)
    assert code is Code.INVALID_ARGUMENT
    assert said in details


def test_an_image_is_drawn_from_tensors() -> None:
    async def scenario() -> None:
        engine = painter()
        async with served(engine, allow_prompt_embeds=True) as opened:
            information = {NEGATIVE: InformationEntry(tensor=GOOD)}
            asked = call(opened, prompt="", prompt_embeds=GOOD, additional_information=information)
            assert [update.step async for update in asked][-1] == 6
        [drawn] = engine.drawn
        assert drawn.prompt == []
        for given in (drawn.conditioning.prompt, drawn.conditioning.negative):
            assert given is not None and given.array().tolist() == [[1, 2], [3, 4]]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("finish", "code"),
    [
        (FinishReason.ERROR, Code.INTERNAL),
        (FinishReason.TIMEOUT, Code.DEADLINE_EXCEEDED),
        (FinishReason.REJECTED, Code.INVALID_ARGUMENT),
        (FinishReason.ABORT, Code.UNAVAILABLE),
    ],
)
def test_an_image_that_ends_badly_has_its_status(finish: FinishReason, code: grpc.StatusCode) -> None:
    told, details = refusal(painter([Output(denoise_step=1), Output(denoise_step=1, finish=finish, error="So it is.")]))
    assert told is code
    assert "So it is." in details


def test_what_the_engine_refuses_and_what_takes_too_long() -> None:
    engine = painter()
    engine.refuse = Overloaded("full")
    assert refusal(engine)[0] is Code.RESOURCE_EXHAUSTED
    engine.refuse = Unavailable("restarting")
    assert refusal(engine)[0] is Code.UNAVAILABLE
    slow = painter([Output(denoise_step=1), forever])
    assert refusal(slow, {"request_timeout_s": 0.1})[0] is Code.DEADLINE_EXCEEDED
    assert not slow.open


def test_a_defect_tells_no_secrets() -> None:
    code, details = refusal(painter([RuntimeError("boom in /home/secret")]), trace_id="t-1")
    assert code is Code.INTERNAL
    assert "secret" not in details and "t-1" in details


def test_what_is_no_message_is_the_clients_mistake() -> None:
    async def scenario() -> None:
        async with served(painter()) as opened:
            code, details = await refused(opened.channel.unary_stream(GENERATE_IMAGE)(b"\xff\xff\xff"))
            assert (code, details) == (Code.INVALID_ARGUMENT, "What was sent is not a GenerateImageRequest.")

    asyncio.run(scenario())


def test_cancelling_aborts_and_is_counted() -> None:
    async def scenario() -> None:
        engine = painter([Output(denoise_step=1), forever])
        async with served(engine) as opened:
            asked = call(opened)
            assert (await asked.read()).step == 1
            assert len(engine.open) == 1
            asked.cancel()
            await until(lambda: not engine.open)
            metrics = (await opened.health()).metrics
            assert metrics["requests_aborted"] == "1"

    asyncio.run(scenario())


def test_draining_and_ending_images() -> None:
    async def scenario() -> None:
        engine = painter([Output(denoise_step=1), forever])
        async with served(engine) as opened:
            asked = call(opened)
            await asked.read()
            opened.admission.drain()
            assert (await refused(call(opened)))[0] is Code.UNAVAILABLE
            opened.admission.abort()
            _, code, details = await failed(asked)
            assert code is Code.UNAVAILABLE and "shutting down" in details
            assert not engine.open

    asyncio.run(scenario())


def test_images_and_predictions_share_one_limit() -> None:
    async def scenario() -> None:
        engine = painter([Output(denoise_step=1), forever])
        async with served(engine, grpc_max_streams=1) as opened:
            asked = call(opened)
            await asked.read()
            for other in (call(opened), opened.predict([])):
                code, details = await refused(other)
                assert code is Code.RESOURCE_EXHAUSTED and "1 streams" in details
            asked.cancel()
            await until(lambda: not engine.open)
            engine.image_script = None
            assert len([update async for update in call(opened)]) == 6

    asyncio.run(scenario())


def test_both_models_are_listed() -> None:
    async def scenario() -> None:
        async with served(painter()) as opened:
            assert (await opened.control("list_models")).payload["models"] == "scripted,painter"
        async with served(ScriptedEngine()) as opened:
            assert (await opened.control("list_models")).payload["models"] == "scripted"

    asyncio.run(scenario())
