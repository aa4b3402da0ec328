"""`weft serve --engine cpu-vllm`: HTTP and gRPC with vLLM behind them, and what their clients see when it is killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from tests.api.grpc.calls import Client, answer_to, check_whole
from tests.api.grpc.calls import ask as asked
from tests.backends.vllm.groups import group_of
from tests.backends.vllm.real import ask, eager, engine_core, needs_vllm
from tests.e2e.server import Server
from tests.waiting import wait_until
from weft.backends import create_engine
from weft.backends.blocking import BlockingEngine
from weft.types import SamplingParams

pytestmark = needs_vllm

MESSAGES = [{"role": "user", "content": "The weft runs across the warp."}]


class VllmServer(Server):
    def __init__(self, model: Path, adapters: dict[str, str]) -> None:
        flags = ["--max-model-len", "512", "--kv-cache-memory-mb", "64", "--start-timeout-s", "1000"]
        flags += [word for name, path in adapters.items() for word in ("--adapter", f"{name}={path}")]
        super().__init__("--engine", "cpu-vllm", "--model", str(model), "--served-model-name", "tiny", *flags)

    def engine_pid(self) -> int:
        (pid,) = (p for p in self.children() if "weft.backends.vllm.host" in Path(f"/proc/{p}/cmdline").read_text())
        return pid

    def grpc_port(self) -> int:
        found = re.search(r"gRPC answers on port (\d+)", "".join(self.log))
        assert found
        return int(found[1])

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json={"model": "tiny", **body}, timeout=300)


@pytest.fixture(scope="module")
def server(vllm_model: Path, adapters: dict[str, str]) -> Iterator[VllmServer]:
    restore = eager()
    with VllmServer(vllm_model, adapters) as started:
        yield started
    restore()


def chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def test_a_chat_is_streamed_as_it_is_answered_whole(server: VllmServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    whole = server.post("/v1/chat/completions", **body).json()
    with httpx.stream(
        "POST",
        server.url + "/v1/chat/completions",
        json={"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, **body},
        timeout=300,
    ) as response:
        got = list(chunks(response))
    assert len(got) > 10, "a piece for every token or so"
    text = "".join(choice["delta"].get("content") or "" for chunk in got for choice in chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"] != ""
    assert got[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 30


def test_the_answer_is_the_native_engines(server: VllmServer, native: BlockingEngine) -> None:
    prompt = [5, 6, 7]
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    choice = server.post("/v1/completions", **body).json()["choices"][0]
    theirs = ask(native, prompt, SamplingParams(max_tokens=8, temperature=0, logprobs=2, ignore_eos=True))
    assert choice["text"] == theirs.text
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([s.logprob for s in theirs.logprobs], abs=1e-4)


def test_a_schema_is_kept(server: VllmServer) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=200, seed=3, response_format=form)
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop" and json.loads(choice["message"]["content"])["n"] in (1, 2)


def test_what_vllm_cannot_is_refused_and_not_dropped(server: VllmServer) -> None:
    assert server.post("/v1/embeddings", input="a").status_code in (400, 501)
    assert server.post("/v1/completions", prompt="", max_tokens=1).status_code == 400
    assert server.post("/v1/completions", prompt=[5] * 600, max_tokens=1).status_code == 400


def test_adapters_are_models_and_write_what_they_write_for_callers_that_wait(
    server: VllmServer, vllm_model: Path, adapters: dict[str, str]
) -> None:
    listed = {card["id"]: card.get("parent") for card in server.get("/v1/models").json()["data"]}
    assert listed == {"tiny": None, "red": "tiny", "blue": "tiny"}
    words = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "repetition_penalty": 1}

    def served(**which: str) -> str:
        answer = server.post("/v1/completions", prompt="The weft runs", **words, **which).json()
        assert answer["model"] == which.get("model", "tiny")
        return answer["choices"][0]["text"]

    texts = {name: served(model=name) for name in ("tiny", "red", "blue")}
    assert len(set(texts.values())) == 3
    assert (served(adapter="blue"), served(adapter="")) == (texts["blue"], texts["tiny"])
    assert server.post("/v1/completions", prompt="hi", model="green").status_code == 404
    assert server.post("/v1/completions", prompt="hi", adapter="green").status_code == 400
    waited = create_engine("cpu-vllm", max_model_len=512, kv_cache_memory_mb=64, start_timeout_s=1000.0)
    waited.load_model(str(vllm_model), adapters["red"], adapters={"blue": adapters["blue"]})
    try:
        heard = [
            "".join(waited.infer("The weft runs", **words, **named))
            for named in ({"lora_name": ""}, {}, {"lora_name": "blue"})
        ]
    finally:
        waited.unload_model()
    assert heard == list(texts.values()), "adapter_path is for requests that name none"


def test_a_client_that_leaves_ends_its_request(server: VllmServer) -> None:
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 500, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=300) as response:
        next(chunks(response))
    wait_until(lambda: server.metric("weft_num_requests_running") == 0, "its request is ended")
    assert server.metric("weft_generation_tokens_total") < 10_000


def test_tc_004_grpc_messages_are_what_they_are_with_every_engine(server: VllmServer) -> None:
    async def scenario() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port()}") as channel:
            request = asked("The weft runs", "t1", generation={"max_new_tokens": 20, "temperature": 0.0})
            responses = await answer_to(Client(channel), request)
            check_whole(responses)
            assert responses[-1].ttft_ms > 0 and responses[-1].tokens_per_sec > 0

    asyncio.run(scenario())


def test_a_stream_goes_on_when_vllm_is_killed(server: VllmServer) -> None:
    """With its adapter. The client sees a pause; the log tells why, and health that it was so."""
    body = {"model": "red", "prompt": [5, 6, 7], "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    whole = server.post("/v1/completions", **body).json()["choices"][0]["text"]
    with httpx.stream("POST", server.url + "/v1/completions", json={"stream": True, **body}, timeout=1000) as response:
        pieces = chunks(response)
        text = next(pieces)["choices"][0]["text"]
        os.kill(engine_core(server.engine_pid()), signal.SIGKILL)
        wait_until(lambda: server.get("/health").status_code == 503, "health says so")
        for piece in pieces:
            assert "error" not in piece, piece
            text += "".join(choice["text"] for choice in piece["choices"])
    assert text == whole
    assert server.get("/health").status_code == 200
    assert server.metric("weft_engine_restarts_total") == 1
    assert any("The engine died: EngineFault: vLLM died" in line for line in server.log)


def test_vllm_ends_with_the_server_even_when_that_is_killed(server: VllmServer) -> None:
    """The last of this file."""
    host = server.engine_pid()
    shared = {file for pid in group_of(host) for file in mapped(pid)}
    assert shared, "vLLM's processes share memory"
    folder = Path(json.loads(Path(f"/proc/{host}/cmdline").read_text().split("\0")[3])["folder"])
    assert folder.exists()
    server.process.kill()
    wait_until(lambda: not group_of(host), "vLLM ends")
    assert not [file for file in (*shared, folder) if Path(file).exists()]


def mapped(pid: int) -> set[str]:
    return set(re.findall(r"/dev/shm/psm_\w+", Path(f"/proc/{pid}/maps").read_text()))
