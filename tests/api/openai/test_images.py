"""Images over HTTP: what the engine is asked for, what clients read, and what is refused."""

from __future__ import annotations

import base64
import io
import logging
from typing import Any

import httpx
import openai
import pytest
from openai.types import ImagesResponse
from openai.types.image_gen_completed_event import ImageGenCompletedEvent
from openai.types.image_gen_partial_image_event import ImageGenPartialImageEvent
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests import virtual_time
from tests.api.http import error_of, post, real_server, request
from tests.api.openai.pixels import pixels_of
from tests.api.scripted_engine import PAINTER, ScriptedEngine, forever, picture
from tests.api.test_disconnect import post_raw
from tests.serving.test_rate_limits import hang_up, limited_app
from tests.waiting import PATIENCE, wait_until
from weft import logs
from weft.api.app import build_app
from weft.config import load
from weft.errors import InvalidRequest, Overloaded
from weft.observe.traces import Traces
from weft.serving import admission
from weft.types import FinishReason, ImageParams, Output

IMAGES = "/v1/images/generations"
BODY = {"prompt": "a red circle"}


def painter() -> ScriptedEngine:
    return ScriptedEngine(images=PAINTER)


def ask(engine: ScriptedEngine, **fields: Any) -> httpx.Response:
    return post(engine, IMAGES, BODY | fields)


def rgb_of(b64_json: str) -> bytes:
    width, height, rgb = pixels_of(base64.b64decode(b64_json))
    assert (width, height) == (PAINTER.width, PAINTER.height)
    return rgb


def test_an_image_as_openai_s_client_reads_it() -> None:
    engine = painter()
    body = ask(engine, model="painter", seed=7).json()
    answer = ImagesResponse.model_validate(body)
    [drawn] = engine.drawn
    assert drawn.prompt == list(b"a red circle")
    assert drawn.image == ImageParams(width=4, height=2, steps=6, guidance_scale=3.0, seed=7)
    assert answer.data is not None and answer.usage is not None
    assert rgb_of(answer.data[0].b64_json or "") == picture(drawn.image, 6)
    assert body["data"][0]["seed"] == 7
    assert (answer.size, answer.output_format, answer.background) == ("4x2", "png", "opaque")
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (12, 60, 72)


def test_several_images_have_seeds_of_their_own_and_keep_their_order() -> None:
    engine = painter()
    body = ask(engine, n=3, seed=2**63 - 1, partial_images=0).json()
    seeds = [2**63 - 1, -(2**63), -(2**63) + 1]
    assert [drawn.image.seed for drawn in engine.drawn] == seeds
    assert [image["seed"] for image in body["data"]] == seeds
    assert [rgb_of(image["b64_json"])[0] for image in body["data"]] == [seed % 256 for seed in seeds]
    assert body["usage"]["input_tokens"] == 12, "a prompt counts once"
    assert body["usage"]["output_tokens"] == 180


def test_every_field_reaches_the_engine() -> None:
    engine = painter()
    fields = {
        "model": "painter", "size": "4x2", "seed": -3, "num_inference_steps": 9, "guidance_scale": 2,
        "negative_prompt": "blue", "sampler": "heun", "priority": 4, "cache_salt": "s", "response_format": "b64_json",
        "output_format": "png", "quality": "auto", "style": "natural", "background": "opaque", "moderation": "low",
        "user": "u", "output_compression": 100,
    }  # fmt: skip
    assert ask(engine, **fields).status_code == 200
    [drawn] = engine.drawn
    assert drawn.image == ImageParams(
        width=4, height=2, steps=9, guidance_scale=2.0, seed=-3, sampler="heun", negative_token_ids=list(b"blue")
    )
    assert (drawn.priority, drawn.cache_salt) == (4, "s")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 4001}, "prompt"),
        ({"prompt": "x" * 41}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 11}, "n"),
        ({"n": 500}, "n"),
        ({"size": "1024x1024"}, "size"),
        ({"size": "big"}, "size"),
        ({"response_format": "url"}, "response_format"),
        ({"output_format": "jpeg"}, "output_format"),
        ({"background": "transparent"}, "background"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": 1001}, "num_inference_steps"),
        ({"guidance_scale": 51}, "guidance_scale"),
        ({"sampler": "ddim"}, "sampler"),
        ({"seed": 2**63}, "seed"),
        ({"priority": 2**31}, "priority"),
        ({"partial_images": 1}, "partial_images"),
        ({"stream": True, "partial_images": 21}, "partial_images"),
        ({"model": "scripted"}, "model"),
        ({"steps": 3}, "steps"),
        ({"prompt_embeds": {"data": "", "shape": [1] * 9, "dtype": "float32"}}, "prompt_embeds.shape"),
        (
            {"additional_information": {"entries": {"a": {"values": [1] * 1025}}}},
            "additional_information.entries.a.values",
        ),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    engine = painter()
    response = ask(engine, **fields)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    assert not engine.drawn


def test_refusals_tell_what_can_be_drawn() -> None:
    engine = painter()
    assert "painter generates 4x2" in error_of(ask(engine, size="64x64"))["message"]
    assert "at most 40" in error_of(ask(engine, prompt="x" * 41))["message"]
    assert "'painter'" in error_of(ask(engine, model="scripted"))["message"]
    unknown = ask(engine, model="dall-e-3")
    assert unknown.status_code == 404 and "'painter'" in error_of(unknown)["message"]
    for model in ({}, {"model": "scripted"}, {"model": "painter"}):
        response = ask(ScriptedEngine(), **model)
        assert response.status_code == 400
        assert "no image model" in error_of(response)["message"] and "smollm2" in error_of(response)["message"]


def test_models_tell_what_they_can_do() -> None:
    both = request(painter(), "GET", "/v1/models").json()["data"]
    assert [(card["id"], card["capabilities"]) for card in both] == [
        ("scripted", ["chat", "completions", "embeddings"]),
        ("painter", ["images"]),
    ]
    assert (both[1]["sizes"], both[1]["max_model_len"]) == (["4x2"], 40)
    assert "sizes" not in both[0]
    assert request(painter(), "GET", "/v1/models/painter").json() | {"created": 0} == both[1] | {"created": 0}
    [alone] = request(ScriptedEngine(), "GET", "/v1/models").json()["data"]
    assert alone["id"] == "scripted"
    missing = request(ScriptedEngine(), "GET", "/v1/models/painter")
    assert missing.status_code == 404 and "scripted" in error_of(missing)["message"]


def test_the_openai_client_draws() -> None:
    engine = painter()
    with (
        real_server(build_app(engine, load(env={}))) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="k") as client,
    ):
        answer = client.images.generate(prompt="a red circle", model="painter", n=2, extra_body={"seed": 1})
        assert [rgb_of(image.b64_json or "")[0] for image in answer.data or ()] == [1, 2]
        events = list(client.images.generate(prompt="a", model="painter", stream=True, partial_images=2))
        with pytest.raises(openai.BadRequestError, match="4x2"):
            client.images.generate(prompt="a", size="1024x1024")
        engine.image_script = [Output(denoise_step=1), InvalidRequest("it broke")]
        with pytest.raises(openai.APIError, match="it broke"):
            list(client.images.generate(prompt="a", stream=True))
    shown = [event for event in events if not event.type.endswith("progress")]
    assert [type(event) for event in shown] == [ImageGenPartialImageEvent] * 2 + [ImageGenCompletedEvent]
    assert [rgb_of(event.b64_json)[1] for event in shown] == [2, 4, 6]


def test_one_image_that_fails_fails_the_request_and_ends_the_others() -> None:
    engine = painter()
    engine.refuse, engine.refuse_from = Overloaded("full", retry_after_s=7), 2
    response = ask(engine, n=3)
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert len(engine.drawn) == 2 and not engine.open


@pytest.mark.parametrize(
    ("finish", "status"),
    [
        (FinishReason.ERROR, 500),
        (FinishReason.TIMEOUT, 504),
        (FinishReason.REJECTED, 400),
        (FinishReason.ABORT, 503),
    ],
)
def test_an_image_that_ends_badly_has_its_status_and_is_counted_so(finish: FinishReason, status: int) -> None:
    engine = painter()
    engine.image_script = [Output(denoise_step=1), Output(denoise_step=1, finish=finish, error="So it is.")]
    with real_server(build_app(engine, load(env={}))) as url:
        response = httpx.post(url + IMAGES, json=BODY, timeout=PATIENCE)
        metrics = httpx.get(url + "/metrics", timeout=PATIENCE).text
    assert response.status_code == status and "So it is." in response.text
    assert f'weft_request_success_total{{finished_reason="{finish}",model_name="scripted"}} 1.0' in metrics


@pytest.mark.parametrize("script", [[Output(denoise_step=1)], [Output(denoise_step=6, finish=FinishReason.STOP)]])
def test_an_engine_that_breaks_its_word_is_an_error(script: list[Any]) -> None:
    engine = painter()
    engine.image_script = script
    assert ask(engine).status_code == 500
    assert not engine.open


def test_a_request_that_takes_too_long_is_ended() -> None:
    engine = painter()
    engine.image_script = [forever]
    config = load({"request_timeout_s": 0.05}, env={})
    response = request(engine, "POST", IMAGES, config, run=virtual_time.run, json=BODY | {"n": 2})
    assert response.status_code == 504
    assert len(engine.drawn) == 2 and not engine.open


@pytest.mark.parametrize("script", [[forever], [Output(denoise_step=1), forever]], ids=["queued", "drawing"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_hangs_up_ends_its_images_and_every_end_is_counted(stream: bool, script: list[Any]) -> None:
    engine = painter()
    engine.image_script = script
    with real_server(build_app(engine, load(env={}))) as url:
        connection = post_raw(url, IMAGES, BODY | {"n": 3, "stream": stream})
        wait_until(lambda: len(engine.open) == 3)
        if stream and len(script) == 2:
            assert connection.recv(100)
        connection.close()
        wait_until(lambda: not engine.open)
        counted = 'weft_request_success_total{finished_reason="abort",model_name="scripted"} 3.0'
        wait_until(lambda: counted in httpx.get(url + "/metrics", timeout=PATIENCE).text, "all ends are counted")


def test_a_prompt_and_its_images_are_charged_to_the_key() -> None:
    """12 tokens of the prompt, once, and 60 of each image, of which 96 are reserved: when three calls have taken 396
    tokens, the 204 of a fourth must be waited for."""
    app, purse = limited_app(painter(), 500)
    with real_server(app) as url:
        statuses = [httpx.post(url + IMAGES, json=BODY | {"n": 2}, timeout=PATIENCE).status_code for _ in range(4)]
    assert statuses == [200, 200, 200, 429] and purse.level == 500 - 3 * 132


def test_an_image_is_paid_for_by_a_client_that_hangs_up() -> None:
    engine = painter()
    engine.image_script = [forever]
    app, purse = limited_app(engine, 500)
    with real_server(app) as url:
        hang_up(url, engine, IMAGES, BODY)
    assert purse.level == 500 - 12 - 96


def test_a_span_of_the_model_that_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    traces = Traces(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(admission, "open_traces", lambda endpoint: traces)
    body = BODY | {"n": 2, "negative_prompt": "blue"}
    request(painter(), "POST", IMAGES, load({"otlp_endpoint": "http://collector"}, env={}), json=body)
    [span] = exporter.get_finished_spans()
    traces.close()
    told = dict(span.attributes or {})
    assert (told["gen_ai.request.model"], told["gen_ai.request.choice.count"]) == ("painter", 2)
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (16, 120)


def test_a_line_of_the_log_without_the_prompt() -> None:
    written = io.StringIO()
    logger = logging.getLogger("weft.api.middleware")
    handler = logging.StreamHandler(written)
    handler.setFormatter(logs.LineFormatter())
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        ask(painter(), n=2)
        request(painter(), "POST", IMAGES, load({"log_prompts": True}, env={}), json=BODY)
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    first, second = written.getvalue().splitlines()
    assert "model=painter prompt_tokens=12 images=2 steps=6 finish=stop answer_id=img-" in first
    assert "red circle" not in first and "red circle" in second
