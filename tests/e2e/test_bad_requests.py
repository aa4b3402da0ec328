"""Requests that cannot be, over HTTP and gRPC of one real server: each is refused as the client's own mistake, and a
request that runs beside them does not notice."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.e2e.tiny_server import TinyServer
from tests.waiting import PATIENCE, wait_until
from weft.api.grpc.ai_service_pb2 import GenerationParameters, StreamPredictRequest, StreamPredictResponse
from weft.api.handler import FIELDS_HEADER

CONTEXT = 128
"""Of the small server."""
JSON = {"content-type": "application/json"}
HUGE = 2**63
ONE_TOKEN = "Z"
"""A letter that the tiny model's tokenizer joins with no other: so many letters, so many tokens."""


class Canary(threading.Thread):
    """Asks for the same answer over and over, and notes whether it ever changes."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._client = httpx.Client(base_url=url, timeout=PATIENCE)
        self.first = self.ask()
        self.runs = 0
        self.changed: list[str] = []
        self.leaving = threading.Event()
        self.start()

    def ask(self) -> str:
        body = {"model": "tiny", "prompt": "The weft runs", "max_tokens": 16, "temperature": 0.9, "seed": 7}
        response = self._client.post("/v1/completions", json=body | {"stream": True, "ignore_eos": True})
        assert response.text.endswith("data: [DONE]\n\n"), response.text
        events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        return "".join(choice["text"] for event in events for choice in event["choices"])

    def run(self) -> None:
        while not self.leaving.is_set():
            answer = self.ask()
            if answer != self.first:
                self.changed.append(answer)
            self.runs += 1
        self._client.close()


class Clients:
    def __init__(self, server: TinyServer) -> None:
        self.server = server
        self._channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port()}")
        self.http = httpx.Client(base_url=server.url, timeout=PATIENCE)

    def predict(self, *, prompt: Any = "hi", model_id: str = "", **generation: Any) -> str:
        """The status of a prediction."""
        call = self._channel.stream_stream(
            "/cy.llm.AiInference/StreamPredict",
            request_serializer=StreamPredictRequest.SerializeToString,
            response_deserializer=StreamPredictResponse.FromString,
        )
        given = {"max_new_tokens": 2, **generation}
        request = StreamPredictRequest(prompt=prompt, model_id=model_id, generation=GenerationParameters(**given))
        try:
            assert list(call(iter([request]), timeout=PATIENCE))[-1].end_of_stream
        except grpc.RpcError as error:
            return error.code().name
        return "OK"

    def close(self) -> None:
        self._channel.close()
        self.http.close()


@pytest.fixture(scope="module")
def clients(small_server: TinyServer) -> Iterator[Clients]:
    clients = Clients(small_server)
    yield clients
    clients.close()
    small_server.check_unharmed()


@pytest.fixture(scope="module")
def canary(clients: Clients) -> Iterator[Canary]:
    canary = Canary(clients.server.url)
    yield canary
    canary.leaving.set()
    canary.join()


@pytest.fixture(autouse=True)
def beside(canary: Canary) -> Iterator[None]:
    """A whole answer goes by beside every test, and it is the same as ever."""
    before = canary.runs
    yield
    wait_until(lambda: canary.runs > before + 1, "a whole answer beside the test")
    assert not canary.changed


def completion(clients: Clients, **fields: Any) -> httpx.Response:
    return clients.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", "max_tokens": 2, **fields})


def chat(clients: Clients, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    return clients.http.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": messages, "max_tokens": 2, **fields}
    )


NUMBERS = [HUGE, -HUGE, 2**31, -1e308, 1e308, "1", [], {}, True, [1]]
FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
INTEGERS = ["max_tokens", "top_k", "min_tokens", "n", "logprobs"]


def test_numbers_that_cannot_be(clients: Clients) -> None:
    for field in (*FLOATS, *INTEGERS, "seed", "priority"):
        for value in NUMBERS:
            if field == "seed" and type(value) is int and -HUGE <= value < HUGE:
                continue
            response = completion(clients, **{field: value})
            assert response.status_code == 400, (field, value, response.text)
            assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "1" * 400, "0x1", "01", "1.", ".5"])
def test_literals_that_are_no_numbers(clients: Clients, literal: str) -> None:
    prompts = {"completions": '"prompt":"hi"', "chat/completions": '"messages":[{"role":"user","content":"hi"}]'}
    for field in (*FLOATS, *INTEGERS, "seed"):
        for path, prompt in prompts.items():
            content = f'{{"model":"tiny",{prompt},"{field}":{literal}}}'
            response = clients.http.post(f"/v1/{path}", content=content, headers=JSON)
            assert response.status_code == 400, response.text


COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": ""}, {"prompt": []}, {"prompt": [""]}, {"prompt": ["a", ""]}, {"prompt": [[]]},
    {"prompt": [[1], []]},
    {"prompt": None}, {"prompt": 1}, {"prompt": {}}, {"prompt": [1, "a"]}, {"prompt": [1.5]}, {"prompt": [True]},
    {"prompt": [-1]}, {"prompt": [HUGE]}, {"prompt": [10**6]}, {"prompt": [[1], ["a"]]},
    {"model": ""}, {"model": 1}, {"stop": [""]}, {"stop": ["x"] * 17}, {"stop": "x" * 257},
    {"stop": 1}, {"logit_bias": {"a": 1}}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"1": 101}},
    {"logit_bias": {"1": None}}, {"logit_bias": {str(HUGE): 1}}, {"logit_bias": []},
    {"logit_bias": {str(token): 1 for token in range(1025)}}, {"stop_token_ids": [-1]}, {"stop_token_ids": [10**9]},
    {"stop_token_ids": ["1"]}, {"stop_token_ids": [HUGE]}, {"cache_salt": "x" * 257}, {"cache_salt": 1},
    {"request_id": "a b"}, {"request_id": ""}, {"stream": 1}, {"stream": "true"}, {"stream_options": {}},
    {"stream_options": {"include_usage": 1}, "stream": True}, {"nonsense": 1}, {"temprature": 1},
]  # fmt: skip


def test_completions_that_cannot_be(clients: Clients) -> None:
    for fields in COMPLETIONS:
        response = completion(clients, **fields)
        assert response.status_code in ((400, 404) if "model" in fields else (400,)), (fields, response.text)
        assert "Traceback" not in response.text and "/" not in response.json()["error"]["message"]
    half_a_character = b'{"model":"tiny","prompt":"\\ud800"}'
    assert clients.http.post("/v1/completions", content=half_a_character, headers=JSON).status_code == 400


CHATS: list[Any] = [
    None, [], {}, "hi", [None], [1], [[]], [{}], [{"role": "user"}], [{"role": "nobody", "content": "x"}],
    [{"role": "user", "content": None}], [{"role": "user", "content": 1}], [{"role": "user", "content": []}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "nothing"}]}],
    [{"role": "user", "content": "x", "extra": 1}], [{"role": 1, "content": "x"}],
]  # fmt: skip


def test_chats_that_cannot_be(clients: Clients) -> None:
    for messages in CHATS:
        response = chat(clients, messages=messages)
        assert response.status_code == 400, (messages, response.text)


BODIES = [b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"\x00", b'{"model":"tiny"', b"{}", b"[" * 10**5]


def test_bodies_that_are_none(clients: Clients) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        for content in BODIES:
            assert clients.http.post(path, content=content, headers=JSON).status_code == 400, (path, content[:20])


GENERATIONS: list[dict[str, Any]] = [
    {name: value}
    for name in ("temperature", "top_p", "repetition_penalty")
    for value in (math.nan, math.inf, -math.inf, -1.0, 1e308, -1e308)
]
GENERATIONS += [{"top_p": 0.0}, {"top_p": 1.1}, {"repetition_penalty": 0.0}, {"temperature": 101.0}]
GENERATIONS += [{"max_new_tokens": count} for count in (0, 2**31, 2**32 - 1)]


def test_predictions_that_cannot_be(clients: Clients) -> None:
    for generation in GENERATIONS:
        assert clients.predict(**generation) == "INVALID_ARGUMENT", generation


def test_an_empty_prompt_is_refused_over_both_protocols(clients: Clients) -> None:
    assert completion(clients, prompt="").status_code == 400
    assert clients.predict(prompt="") == "INVALID_ARGUMENT"


def test_a_prompt_of_nothing_but_special_tokens_is_answered_alike(clients: Clients) -> None:
    for prompt in ("<|im_start|>", "<|im_end|>", "<|endoftext|>" * 5, "\x00", "\ufffd", " ", "\n"):
        assert completion(clients, prompt=prompt).status_code == 200, prompt
        assert clients.predict(prompt=prompt) == "OK", prompt


@pytest.mark.parametrize(
    ("length", "fits"), [(CONTEXT - 2, True), (CONTEXT - 1, False), (CONTEXT, False), (CONTEXT + 1, False)]
)
def test_the_context_ends_over_both_protocols_which_cut_what_is_too_much(
    clients: Clients, length: int, fits: bool
) -> None:
    """With two tokens of an answer."""
    prompt = ONE_TOKEN * length
    assert clients.http.post("/tokenize", json={"prompt": prompt}).json()["count"] == length
    response = completion(clients, prompt=prompt)
    assert response.status_code == (200 if length < CONTEXT else 400)
    if length >= CONTEXT:
        assert response.json()["error"]["code"] == "context_length_exceeded"
    else:
        assert response.headers.get(FIELDS_HEADER) == (None if fits else "max_tokens")
    assert clients.predict(prompt=prompt) == ("OK" if length < CONTEXT else "INVALID_ARGUMENT")


def test_a_prompt_of_the_whole_context_leaves_room_for_one_token(clients: Clients) -> None:
    prompt = ONE_TOKEN * (CONTEXT - 1)
    response = completion(clients, prompt=prompt, max_tokens=1)
    assert response.json()["usage"]["total_tokens"] == CONTEXT
    assert clients.predict(prompt=prompt, max_new_tokens=1) == "OK"


def test_another_model_is_not_found_over_either_protocol(clients: Clients) -> None:
    assert completion(clients, model="other").status_code == 404
    assert clients.predict(model_id="other") == "NOT_FOUND"


WORDS = "the cat sat on a mat, " * 190_000
OVERSIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "a grammar of line ends": ("completions", {"structured_outputs": {"grammar": "\n" * 20_000}}),
    "a regex": ("completions", {"structured_outputs": {"regex": "a" * 8_000_000}}),
    "a schema in a string": ("completions", {"structured_outputs": {"json": '{"enum":[' + "1," * 4_000_000 + "1]}"}}),
    "a prompt": ("completions", {"prompt": WORDS}),
    "a prompt that may be cut": ("completions", {"prompt": WORDS, "truncate_prompt_tokens": 5}),
    "a message": ("chat/completions", {"messages": [{"role": "user", "content": WORDS}]}),
    "an input": ("embeddings", {"input": WORDS}),
    "wrong items": ("completions", {"stop_token_ids": [""] * 2_000_000}),
    "wrong pairs": ("chat/completions", {"metadata": {str(number): 1 for number in range(300_000)}}),
    "a field's name": ("completions", {"temperature_" * 650_000: 1}),
    "stop tokens of many choices": ("completions", {"stop_token_ids": [5] * 900_000, "n": 32}),
}
NEEDED: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "hi"},
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "embeddings": {},
}


@pytest.mark.parametrize("name", OVERSIZED)
def test_a_body_of_megabytes_is_refused_and_takes_little_more_than_its_size(clients: Clients, name: str) -> None:
    path, fields = OVERSIZED[name]
    process = Path(f"/proc/{clients.server.process.pid}")
    (process / "clear_refs").write_text("5")  # The peak is counted from here on.
    before = kilobytes(process, "VmRSS")
    response = clients.http.post(f"/v1/{path}", json={"model": "tiny", **NEEDED[path], **fields})
    assert response.status_code == 400, response.text[:500]
    assert len(response.content) < 1000
    assert kilobytes(process, "VmHWM") - before < 128 * 1024


def kilobytes(process: Path, name: str) -> int:
    (found,) = re.findall(rf"^{name}:\s+(\d+) kB$", (process / "status").read_text(), re.MULTILINE)
    return int(found)


def test_tokenize_and_grpc_refuse_a_text_of_megabytes(clients: Clients) -> None:
    response = clients.http.post("/tokenize", json={"prompt": WORDS * 2, "return_token_strs": True})
    assert response.status_code == 400
    assert "--max-model-len" in response.json()["error"]["message"]
    assert clients.predict(prompt=WORDS[:3_000_000]) == "INVALID_ARGUMENT"
