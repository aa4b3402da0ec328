"""The load of `make chaos` and `make soak`: a server with everything on (tools, grammars, images, embeddings, adapters,
gRPC) over tiny random models, and requests whose answers are known to the byte.

Every request is deterministic: greedy, or with a seed. Its answer is recorded first, alone on the server, and must be
the same beside all the others; whatever happens to the server later, each answer must be the one that was recorded.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from base64 import b64decode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from msgspec import Struct

from tests import tiny_models
from tests.api.grpc.calls import Client, answer_to, ask, check_whole, text_of
from tests.api.openai.pixels import pixels_of
from tests.e2e.connections import Connections
from tests.e2e.tiny_server import NAME, TinyServer
from tests.tiny_adapters import save_adapter
from tests.tiny_images import save_image_model
from tests.waiting import PATIENCE
from weft.bench.http import Address

ADAPTER = "sketch"
SPEC = {
    "cpu": tiny_models.SPECS["smollm2"],
    "cuda": tiny_models.Spec(hidden=1024, middle=2816, layers=12, heads=16, kv_heads=4, head_dim=64, tied=True),
}
"""The language model by device: a GPU gets one whose steps it works on for a while."""
TOPICS = ["the sea", "a red fox", "bread", "the moon", "an old clock", "rivers", "a violin", "winter"]
TOOL = {
    "type": "function",
    "function": {
        "name": "weave",
        "parameters": {
            "type": "object",
            "properties": {"pattern": {"enum": ["twill", "satin", "plain"]}, "rows": {"enum": [8, 16, 32]}},
            "required": ["pattern", "rows"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "threads": {"type": "array", "items": {"enum": ["warp", "weft"]}, "minItems": 20, "maxItems": 20},
        "done": {"type": "boolean"},
    },
    "required": ["threads", "done"],
    "additionalProperties": False,
}
VECTOR_ROUNDING = 1e-4
GRPC = "grpc"
"""In the place of a path: the request is a StreamPredict."""


class MixedRequest(Struct, frozen=True):
    kind: str
    path: str
    body: dict[str, Any]


class Lost(Exception):
    """A request was refused, or its answer ended early."""


class Differs(Exception):
    """An answer is not the one that was recorded."""


def requests(variants: int) -> list[MixedRequest]:
    """Return so many requests of every kind."""
    return [request for number in range(variants) for request in _one_of_each(number)]


def _one_of_each(number: int) -> Iterator[MixedRequest]:
    topic = TOPICS[number % len(TOPICS)]
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": number}
    chat = {"messages": [{"role": "user", "content": f"{number}: tell me about {topic}."}], "stream": True}
    long = chat | {"max_tokens": 160, "ignore_eos": True}
    path = "/v1/chat/completions"
    yield MixedRequest("chat, greedy", path, long | {"temperature": 0})
    yield MixedRequest("chat, sampled", path, long | sampled)
    yield MixedRequest("tools", path, chat | sampled | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200})
    regex = {"structured_outputs": {"regex": "([a-z]{3,7} ){12}[a-z]+\\."}, "max_tokens": 120}
    schema = {"type": "json_schema", "json_schema": {"name": "cloth", "schema": SCHEMA}}
    yield MixedRequest("grammar, regex", path, chat | sampled | regex)
    yield MixedRequest("grammar, schema", path, chat | sampled | {"response_format": schema, "max_tokens": 250})
    yield MixedRequest("adapter", path, long | sampled | {"model": ADAPTER})
    yield MixedRequest("embeddings", "/v1/embeddings", {"input": [f"{topic} {number} " * n for n in (1, 8, 24)]})
    image = {"model": "dit", "prompt": f"{topic} {number}", "seed": number, "num_inference_steps": 40}
    streamed = {"stream": True, "partial_images": 1} if number % 2 else {}
    yield MixedRequest("images", "/v1/images/generations", image | streamed)
    yield MixedRequest(GRPC, GRPC, {"prompt": f"{topic}, {number}", "adapter": ADAPTER if number % 2 else ""})


class MixedServer(TinyServer):
    """The server under the load. Its model, its image model and its adapter are made in the folder."""

    def __init__(self, folder: Path, device: str, *flags: str, **how: Any) -> None:
        name = f"mixed-{device}"
        spec = tiny_models.SPECS[name] = SPEC[device]
        model = tiny_models.save_directory(name, folder / name)
        # Prompts with tools are long: this tokenizer knows few words.
        config = tiny_models.config_json(name) | {"max_position_embeddings": 1024}
        (model / "config.json").write_text(json.dumps(config))
        images = save_image_model(folder / "dit", spec.hidden)
        adapter = save_adapter(name, folder / ADAPTER, size=0.1)
        # In float32 rounding does not decide which token is the likeliest, whoever shares a step.
        super().__init__(
            model,
            *("--device", device, "--dtype", "float32", "--threads", "1", "--num-blocks", "1024"),
            *("--image-model", str(images), "--adapter", f"{ADAPTER}={adapter}", "--tool-style", "hermes"),
            *flags,
            **how,
        )
        self.device = device


class MixedLoad:
    """A client with every kind of request, and the answers that it must get. An async context manager."""

    def __init__(self, server: MixedServer, variants: int) -> None:
        self.requests = requests(variants)
        self._device = server.device
        self._address = Address.parse(server.url)
        self._connections = Connections(self._address)
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port()}")
        self._recorded: dict[int, str] = {}

    async def __aenter__(self) -> MixedLoad:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._connections.close()
        await self._channel.close()

    async def record(self) -> None:
        """Take down the answer that each request gets alone. Raises Differs when it gets another beside the others."""
        for number, request in enumerate(self.requests):
            self._recorded[number] = await self._answer(request)
        await asyncio.gather(*(self.check(number) for number in range(len(self.requests))))

    async def check(self, number: int) -> None:
        """Send a request. Raises Lost and Differs."""
        request, expected = self.requests[number], self._recorded[number]
        try:
            answer = await asyncio.wait_for(self._answer(request), PATIENCE)
        except (OSError, TimeoutError, grpc.aio.AioRpcError, AssertionError) as error:
            raise Lost(f"{request.kind}: {error!r:.1000}") from error
        if answer != expected and not _is_rounding(request.kind, answer, expected, self._device):
            at = next((i for i, pair in enumerate(zip(answer, expected, strict=False)) if len({*pair}) > 1), 0)
            raise Differs(f"{request.kind}: {answer[at:]!r:.200} instead of {expected[at:]!r:.200} at {at}")

    async def is_ready(self) -> bool:
        status, _ = await self._connections.ask(self._address.request("GET", "/health"))
        return status == 200

    async def _answer(self, request: MixedRequest) -> str:
        if request.path == GRPC:
            return await self._predicted(**request.body)
        body = json.dumps({"model": NAME} | request.body).encode()
        status, text = await self._connections.ask(self._address.request("POST", request.path, body))
        assert status == 200, f"{status} {text}"
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        if request.path == "/v1/chat/completions":
            assert events and events[-1] == "[DONE]", f"the stream ended without [DONE]: {text[-500:]}"
            return _joined([json.loads(event) for event in events[:-1]])
        if request.path == "/v1/embeddings":
            return json.dumps([item["embedding"] for item in json.loads(text)["data"]])
        return _shown([json.loads(event) for event in events] if events else json.loads(text)["data"])

    async def _predicted(self, prompt: str, adapter: str) -> str:
        asked = ask(prompt, adapter=adapter, generation={"max_new_tokens": 100, "temperature": 0.0})
        responses = await answer_to(Client(self._channel), asked)
        check_whole(responses)
        return text_of(responses)


def _joined(chunks: list[Any]) -> str:
    """Return the text, the tool calls without their ids, and the end of a streamed chat."""
    content = calls = finish = ""
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                calls += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
            finish += choice["finish_reason"] or ""
    assert finish, "the stream ended without a finish_reason"
    return json.dumps([content, calls, finish])


def _shown(events: list[Any]) -> str:
    """Return the steps that were told and the images that were shown."""
    assert not any("error" in event for event in events), events
    assert "b64_json" in events[-1], "there is no image"
    return json.dumps([[event.get("step"), event.get("b64_json")] for event in events])


def _is_rounding(kind: str, answer: str, expected: str, device: str) -> bool:
    """Return whether two answers are the same but for rounding. That of a vector depends on the pieces that a prompt is
    computed in, and so on what else is in the steps; on a GPU that of an image depends on the images beside it."""
    if kind == "embeddings":
        return np.allclose(json.loads(answer), json.loads(expected), rtol=0, atol=VECTOR_ROUNDING)
    if kind != "images" or device == "cpu":
        return False
    shown, expected_shown = json.loads(answer), json.loads(expected)
    return len(shown) == len(expected_shown) and all(
        step == expected_step and _are_close(image, expected_image)
        for (step, image), (expected_step, expected_image) in zip(shown, expected_shown, strict=True)
    )


def _are_close(image: str | None, expected: str | None) -> bool:
    """Return whether no colour of two pictures differs by more than one level."""
    if image is None or expected is None:
        return image is expected
    ours, theirs = (np.frombuffer(pixels_of(b64decode(one))[2], np.uint8).astype(int) for one in (image, expected))
    return ours.shape == theirs.shape and int(abs(ours - theirs).max()) <= 1


class Usage(Struct, frozen=True):
    """What a process holds, and the seconds that it has computed for."""

    rss_mb: float
    num_files: int
    cpu_s: float


def usage(pid: int) -> Usage:
    (kilobytes,) = re.findall(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    cpu_s = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return Usage(int(kilobytes) / 1024, len(list(Path(f"/proc/{pid}/fd").iterdir())), cpu_s)


def slope(minutes: Sequence[float], values: Sequence[float]) -> float:
    """Return the rise a minute of the line through the values, by least squares; 0 for fewer than two of them."""
    return float(np.polyfit(minutes, values, 1)[0]) if len(values) > 1 else 0.0
