"""The clients that people have, unchanged, against a real server: openai, LangChain, curl, and gRPC by its published
.proto and by reflection."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import grpc
import httpx
import openai
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from pydantic import BaseModel

from tests.e2e.tiny_server import NAME, TinyServer
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

PROTO = Path(__file__).parents[2] / "weft/api/grpc/ai_service.proto"
SING = [{"role": "user", "content": "Sing."}]
SHED = {
    "type": "object",
    "properties": {"shed": {"type": "string", "enum": ["open", "closed"]}},
    "required": ["shed"],
    "additionalProperties": False,
}
LIFT = {"type": "function", "function": {"name": "lift", "description": "Lift threads.", "parameters": SHED}}
LOWER = {"type": "function", "function": {"name": "lower", "description": "Lower them.", "parameters": SHED}}


@pytest.fixture(scope="module")
def server(long_server: TinyServer) -> TinyServer:
    """Its context holds what is said about tools: the model's tokens are hardly more than bytes."""
    return long_server


@pytest.fixture(scope="module")
def client(server: TinyServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


class TestOpenAI:
    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "lower"}}])
    def test_a_forced_call_streamed_and_not(self, client: openai.OpenAI, choice: Any) -> None:
        asked: dict[str, Any] = {
            "model": NAME, "messages": SING, "tools": [LIFT, LOWER], "tool_choice": choice, "seed": 1,
            "parallel_tool_calls": False,
        }  # fmt: skip
        answer = client.chat.completions.create(**asked).choices[0]
        (call,) = answer.message.tool_calls
        assert call.function.name in ("lift", "lower") if choice == "required" else call.function.name == "lower"
        assert json.loads(call.function.arguments)["shed"] in ("open", "closed")

        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == answer.finish_reason
        assert not streamed.message.content and not answer.message.content
        (again,) = streamed.message.tool_calls
        assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)

    def test_tools_that_need_not_be_called(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": NAME, "messages": SING, "tools": [LIFT], "seed": 2, "max_tokens": 30}
        answer = client.chat.completions.create(**asked, tool_choice="auto").choices[0]
        chunks = client.chat.completions.create(**asked, tool_choice="auto", stream=True)
        assert answer.message.content
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.message.content

    def test_several_answers(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": NAME, "messages": SING, "n": 3, "seed": 5, "max_tokens": 12, "logprobs": True}
        whole = client.chat.completions.create(**asked, top_logprobs=2)
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        assert len({choice.message.content for choice in whole.choices}) > 1
        for choice in whole.choices:
            assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in choice.logprobs.content)

        texts = ["", "", ""]
        for chunk in client.chat.completions.create(**asked, stream=True):
            for part in chunk.choices:
                texts[part.index] += part.delta.content or ""
        assert texts == [choice.message.content for choice in whole.choices]

    def test_an_answer_in_the_form_asked_for(self, client: openai.OpenAI) -> None:
        class Loom(BaseModel):
            shed: Literal["open", "closed"]
            treadle: Literal[1, 2, 3]

        parsed = client.chat.completions.parse(model=NAME, messages=SING, response_format=Loom, seed=3)
        assert isinstance(parsed.choices[0].message.parsed, Loom)


class TestLangChain:
    @pytest.fixture
    def chat(self, server: TinyServer) -> Iterator[ChatOpenAI]:
        from langchain_openai import ChatOpenAI

        with httpx.Client(timeout=PATIENCE) as http:
            yield ChatOpenAI(
                base_url=server.url + "/v1",
                api_key="none",
                model=NAME,
                temperature=0,
                seed=1,
                max_tokens=200,
                max_retries=0,
                stream_usage=True,
                http_client=http,
            )

    def test_invoke_and_stream(self, chat: ChatOpenAI) -> None:
        from langchain_core.messages import AIMessageChunk

        whole = chat.invoke("Sing.")
        assert whole.text and whole.usage_metadata["output_tokens"] > 0
        chunks = list(chat.stream("Sing."))
        assert len(chunks) > 2
        joined = chunks[0]
        for chunk in chunks[1:]:
            assert isinstance(chunk, AIMessageChunk)
            joined += chunk
        assert joined.text == whole.text
        assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]

    def test_bind_tools(self, chat: ChatOpenAI) -> None:
        from langchain_core.messages import AIMessageChunk
        from langchain_core.tools import tool

        @tool
        def lift(shed: Literal["open", "closed"]) -> str:
            """Lift the threads."""
            return shed

        bound = chat.bind_tools([lift], tool_choice="lift")
        (call,) = bound.invoke("Weave.").tool_calls
        assert call["name"] == "lift" and lift.invoke(call["args"]) in ("open", "closed")
        joined = sum(bound.stream("Weave."), start=AIMessageChunk(""))
        assert [made["args"] for made in joined.tool_calls] == [call["args"]]

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_with_structured_output(self, chat: ChatOpenAI, method: Literal["json_schema", "function_calling"]) -> None:
        class Loom(BaseModel):
            """A loom."""

            shed: Literal["open", "closed"]

        assert isinstance(chat.with_structured_output(Loom, method=method).invoke("Weave."), Loom)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
class TestCurl:
    def curl(self, server: TinyServer, path: str, body: str, *flags: str) -> str:
        command = ["curl", "--silent", "--show-error", "--max-time", "60", *flags, server.url + path]
        sent = [*command, "-H", "Content-Type: application/json", "-d", body]
        return subprocess.run(sent, capture_output=True, text=True, check=True).stdout

    def test_a_stream(self, server: TinyServer) -> None:
        asked = {"model": NAME, "messages": SING, "max_tokens": 8, "seed": 1, "stream": True, "ignore_eos": True}
        told = self.curl(server, "/v1/chat/completions", json.dumps(asked), "-N", "-i")
        head, _, body = told.partition("\n\n")
        assert head.startswith("HTTP/1.1 200") and "text/event-stream" in head
        *events, done, nothing = body.split("\n\n")
        assert (done, nothing) == ("data: [DONE]", "")
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        assert choices[0]["delta"]["role"] == "assistant" and choices[-1]["finish_reason"] == "length"

    @pytest.mark.parametrize(
        ("body", "named"), [("{", "JSON"), ('{"model": "tiny"}', "messages"), ('{"model": "tiny", "nn": 1}', "nn")]
    )
    def test_a_bad_request(self, server: TinyServer, body: str, named: str) -> None:
        told = self.curl(server, "/v1/chat/completions", body, "-w", "\n%{http_code}")
        answer, _, status = told.rpartition("\n")
        assert status == "400" and named in json.loads(answer)["error"]["message"]


class TestGrpc:
    @pytest.fixture
    def channel(self, server: TinyServer) -> Iterator[grpc.Channel]:
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port()}") as channel:
            yield channel

    def test_a_client_made_from_the_published_proto(self, server: TinyServer, tmp_path: Path) -> None:
        """In a process of its own: a process has each message only once, and this one has the server's."""
        made = ["--python_out", str(tmp_path), "--grpc_python_out", str(tmp_path)]
        protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTO.parent), *made, PROTO.name]
        subprocess.run(protoc, check=True)
        (tmp_path / "client.py").write_text(GRPC_CLIENT)
        command = [sys.executable, "-P", str(tmp_path / "client.py"), f"127.0.0.1:{server.grpc_port()}"]
        told = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
        ).stdout
        *texts, health = json.loads(told)
        assert set(texts) == {completion(server, "Sing.", 12)}
        assert health == "ready"

    def test_reflection_is_enough_for_a_client(self, server: TinyServer, channel: grpc.Channel) -> None:
        """As grpcurl does it: list, describe, call."""
        reflected = ProtoReflectionDescriptorDatabase(channel)
        services = set(reflected.get_services())
        assert {"cy.llm.AiInference", "grpc.health.v1.Health"} <= services
        pool = DescriptorPool(reflected)
        for name in services:
            assert pool.FindServiceByName(name).methods

        method = pool.FindMethodByName("cy.llm.AiInference.StreamPredict")
        asked, answered = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        fields = {"prompt": "Sing.", "generation": {"temperature": 0, "maxNewTokens": 12}}
        call = channel.stream_stream(
            f"/{method.containing_service.full_name}/{method.name}", asked.SerializeToString, answered.FromString
        )
        responses = [MessageToDict(response) for response in call(iter([ParseDict(fields, asked())]), timeout=PATIENCE)]
        assert responses[-1]["endOfStream"]
        assert "".join(response.get("chunk", "") for response in responses) == completion(server, "Sing.", 12)


def completion(server: TinyServer, prompt: str, max_tokens: int) -> str:
    """The same answer over HTTP."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    text: str = httpx.post(server.url + "/v1/completions", json=body, timeout=PATIENCE).json()["choices"][0]["text"]
    return text


GRPC_CLIENT = """
import json, sys
import grpc
from ai_service_pb2 import GenerationParameters, StreamMetadata, StreamPredictRequest, WorkerHealthRequest
from ai_service_pb2_grpc import AiInferenceStub

generation = GenerationParameters(temperature=0, max_new_tokens=12)
texts = {"a": "", "b": ""}
with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = AiInferenceStub(channel)
    requests = [
        StreamPredictRequest(prompt="Sing.", generation=generation, metadata=StreamMetadata(trace_id=name))
        for name in texts
    ]
    for response in stub.StreamPredict(iter(requests), timeout=300):
        texts[response.trace_id] += response.chunk
    health = stub.Health(WorkerHealthRequest(), timeout=300)
print(json.dumps([*texts.values(), health.metrics["state"]]))
"""
