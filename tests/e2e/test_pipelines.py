"""Pipelines of `diffusers` behind the HTTP API of a real server: images step by step, beside chats."""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.api.openai.pixels import pixels_of
from tests.e2e.tiny_server import NAME, TinyServer
from tests.tiny_pipelines import NUM_CLIP_TOKENS, SIZE, WIDTH, save_pipeline
from tests.waiting import PATIENCE, wait_until

if importlib.util.find_spec("diffusers") is None:
    pytest.skip("diffusers is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    """Every kind of pipeline goes through the engine's steps in tests/worker/test_pipelines.py."""
    folder = save_pipeline("StableDiffusion3Pipeline", tmp_path_factory.mktemp("pipelines") / "tiny-pipeline")
    flags = ("--image-model", str(folder), "--threads", "1", "--allow-prompt-embeds")
    with TinyServer(tiny_model, *flags) as server:
        yield server
        server.check_unharmed()


def ask(server: TinyServer, **fields: Any) -> httpx.Response:
    return httpx.post(server.url + "/v1/images/generations", json={"prompt": "a red cat", **fields}, timeout=PATIENCE)


def picture(b64_json: str) -> bytes:
    width, height, rgb = pixels_of(base64.b64decode(b64_json))
    assert (width, height) == (SIZE, SIZE)
    return rgb


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_an_image_comes_back_and_comes_again(server: TinyServer) -> None:
    asked = {"num_inference_steps": 5, "seed": 3, "negative_prompt": "a dog"}
    first, again, other = (ask(server, **asked, **more).json() for more in ({}, {}, {"prompt": "the blue mat"}))
    shown = [picture(answer["data"][0]["b64_json"]) for answer in (first, again, other)]
    assert shown[0] == shown[1] != shown[2]
    assert (first["size"], first["usage"]["output_tokens"]) == (f"{SIZE}x{SIZE}", 5 * 2 * 16)


def tensor(*shape: int) -> dict[str, Any]:
    values = np.random.default_rng(len(shape)).standard_normal(shape, dtype=np.float32)
    return {"data": base64.b64encode(values.tobytes()).decode(), "shape": shape, "dtype": "float32"}


def test_prompt_embeds_latents_and_sigmas_of_a_client_are_drawn_from(server: TinyServer) -> None:
    rows = NUM_CLIP_TOKENS + 256
    entries = {
        "pooled_prompt_embeds": {"tensor": tensor(WIDTH)},
        "latents": {"tensor": tensor(4, 8, 8)},
        "sigmas": {"values": [1.0, 0.6, 0.2]},
    }
    asked = {"prompt": None, "prompt_embeds": tensor(rows, WIDTH), "additional_information": {"entries": entries}}
    first, again = (ask(server, **asked).json() for _ in range(2))
    assert picture(first["data"][0]["b64_json"]) == picture(again["data"][0]["b64_json"])
    assert first["usage"]["output_tokens"] == 3 * 2 * 16, "as many steps as sigmas"
    del entries["pooled_prompt_embeds"]
    refused = ask(server, **asked)
    assert refused.status_code == 400 and "needs pooled_prompt_embeds with it" in refused.text
    refused = ask(server, additional_information={"entries": {"timesteps": {"values": [1]}}})
    assert refused.status_code == 400 and "it knows latents, negative_pooled_prompt_embeds" in refused.text


def test_steps_are_counted_and_previews_shown(server: TinyServer) -> None:
    body = {"prompt": "a cat", "stream": True, "num_inference_steps": 6, "partial_images": 1, "seed": 1}
    with httpx.stream("POST", server.url + "/v1/images/generations", json=body, timeout=PATIENCE) as answer:
        found = list(events(answer.iter_lines()))
    assert [event["step"] for event in found if "step" in event] == [1, 2, 3, 4, 5, 6]
    shown = [picture(event["b64_json"]) for event in found if "b64_json" in event]
    assert len(shown) == 2 and shown[0] != shown[1]


def test_leaving_in_the_middle_frees_the_latent_slot_beside_a_chat(server: TinyServer) -> None:
    """The chat begins before the image and ends after it: neither waits for the other."""
    chat = {
        "model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200, "ignore_eos": True,
        "stream": True, "seed": 1,
    }  # fmt: skip
    image = {"prompt": "a cat", "stream": True, "num_inference_steps": 1000}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=chat, timeout=PATIENCE) as answer:
        told = events(line for line in answer.iter_lines() if "[DONE]" not in line)
        assert next(told)["choices"]
        with httpx.stream("POST", server.url + "/v1/images/generations", json=image, timeout=PATIENCE) as drawing:
            drawn = events(drawing.iter_lines())
            assert [next(drawn)["step"] for _ in range(3)] == [1, 2, 3]
            wait_until(lambda: server.metric("weft_images_running") == 1)
            assert next(told)["choices"]
        left = sum(bool(chunk["choices"]) for chunk in told)
    assert left > 3, "the chat did not go on"
    wait_until(lambda: not server.metric("weft_images_running") and not server.metric("weft_embedding_bytes"))


@pytest.mark.parametrize(
    ("wrong", "param"),
    [({"size": "64x64"}, "size"), ({"sampler": "heun"}, "sampler"), ({"prompt": "a" * 4001}, "prompt")],
    ids=["size", "sampler", "length"],
)
def test_what_a_pipeline_does_not_do_is_a_bad_request(server: TinyServer, wrong: dict[str, Any], param: str) -> None:
    answer = ask(server, **wrong)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
