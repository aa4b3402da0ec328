"""The public client, the real model, a real server."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator

import openai
import pytest
from PIL import Image

from tests.e2e.server import Server

QUESTION = [{"role": "user", "content": "What is the capital of Germany?"}]
TWO_PLUS_TWO = "One, two, three, four, five, six,"


@pytest.fixture(scope="module")
def client(locked: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=locked.url + "/v1", api_key="sesame", max_retries=0) as client:
        yield client


def test_chat_streamed_and_not_are_the_same(client: openai.OpenAI) -> None:
    asked = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**asked)
    assert "Berlin" in whole.choices[0].message.content
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].delta.role for chunk in chunks if chunk.choices].count("assistant") == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert ends == [whole.choices[0].finish_reason]


def test_the_prefix_cache_is_reported(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "You are a pirate. " * 30}, *QUESTION]
    first = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=1)
    second = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=1)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert 0 <= second.usage.prompt_tokens - 1 - cached < 16
    salted = client.chat.completions.create(
        model="smollm2", messages=messages, max_tokens=1, extra_body={"cache_salt": "somebody else"}
    )
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_completions_stop_and_logprobs(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model="smollm2", prompt=TWO_PLUS_TWO, temperature=0, max_tokens=12, stop=["eight"], logprobs=3
    )
    choice = done.choices[0]
    assert choice.finish_reason == "stop"
    assert "seven" in choice.text and "eight" not in choice.text
    assert len(choice.logprobs.tokens) == done.usage.completion_tokens
    assert all(len(top) >= 3 for top in choice.logprobs.top_logprobs)
    assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs)


def test_a_seed_repeats_and_another_does_not(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        done = client.chat.completions.create(
            model="smollm2", messages=QUESTION, temperature=1.2, seed=seed, max_tokens=10
        )
        return done.choices[0].message.content

    first = ask(1)
    assert ask(1) == first != ask(2)


def test_chinese_arrives_in_whole_characters(client: openai.OpenAI) -> None:
    chunks = client.completions.create(
        model="smollm2", prompt="中文：你好，世界！中文：你好，", temperature=0, max_tokens=24, stream=True
    )
    parts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert any("一" <= char <= "鿿" for part in parts for char in part)
    assert "�" not in "".join(parts[:-1])


def test_several_prompts_in_one_request(client: openai.OpenAI) -> None:
    prompts = [TWO_PLUS_TWO, "The sky is"]
    together = client.completions.create(model="smollm2", prompt=prompts, temperature=0, max_tokens=8)
    alone = [client.completions.create(model="smollm2", prompt=p, temperature=0, max_tokens=8) for p in prompts]
    assert [choice.index for choice in together.choices] == [0, 1]
    assert [choice.text for choice in together.choices] == [one.choices[0].text for one in alone]


def test_errors_are_openais(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="modalities"):
        client.chat.completions.create(model="smollm2", messages=QUESTION, modalities=["audio"])
    with pytest.raises(openai.BadRequestError, match=r"9000 tokens.*8192") as error:
        client.completions.create(model="smollm2", prompt=[1000] * 9000)
    assert error.value.code == "context_length_exceeded"


def test_models(client: openai.OpenAI, locked: Server) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2", "shapes"]
    assert client.models.retrieve("smollm2").id == "smollm2"
    assert locked.get("/health/live").status_code == 200


def test_one_server_writes_and_draws(client: openai.OpenAI) -> None:
    """The image is read from its pixels: a red figure before a blue background."""
    images = client.images.generate(prompt="a red circle on a blue background", n=2, extra_body={"seed": 1}).data
    assert images is not None and len(images) == 2
    for image in images:
        assert image.b64_json is not None
        pixels = Image.open(io.BytesIO(base64.b64decode(image.b64_json))).convert("RGB")
        assert pixels.size == (32, 32)
        for place, strongest in (((1, 1), 2), ((16, 16), 0)):
            colour = pixels.getpixel(place)
            assert isinstance(colour, tuple) and max(colour) == colour[strongest] > 150, (place, colour)
