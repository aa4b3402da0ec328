"""The messages on the wire are those that clients already speak."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor

import weft
from tests.api.grpc.calls import STREAM_PREDICT, served
from tests.api.scripted_engine import ScriptedEngine
from tests.e2e.oversized import varint
from weft.api.grpc import ai_service_pb2
from weft.api.grpc.status import parse
from weft.errors import InvalidRequest

PROTO = "weft/api/grpc/ai_service.proto"
ROOT = Path(weft.__file__).parent.parent

STRING, BOOL = FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BOOL
INT32, UINT32 = FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_UINT32
FLOAT, DOUBLE, MESSAGE = FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_MESSAGE
INT64, BYTES = FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_BYTES

FIELDS = {
    "StreamPredictRequest": {
        "model_id": (1, STRING), "prompt": (2, STRING), "adapter": (3, STRING), "priority": (4, INT32),
        "generation": (5, MESSAGE), "metadata": (6, MESSAGE), "worker_hint": (7, STRING), "cache_salt": (8, STRING),
        "segments": (9, MESSAGE),
    },
    "PromptSegment": {"text": (1, STRING), "token_ids": (2, MESSAGE), "prompt_embeds": (3, MESSAGE)},
    "TokenIds": {"ids": (1, UINT32)},
    "GenerationParameters": {
        "max_new_tokens": (1, UINT32), "temperature": (2, DOUBLE), "top_p": (3, DOUBLE),
        "repetition_penalty": (4, DOUBLE),
    },
    "StreamMetadata": {
        "trace_id": (1, STRING), "tenant": (2, STRING), "player_id": (3, STRING), "locale": (4, STRING),
        "extra": (5, MESSAGE),
    },
    "StreamPredictResponse": {
        "trace_id": (1, STRING), "chunk": (2, STRING), "end_of_stream": (3, BOOL), "index": (4, UINT32),
        "ttft_ms": (5, FLOAT), "tokens_per_sec": (6, FLOAT), "prompt_tokens": (7, UINT32),
        "completion_tokens": (8, UINT32), "fields_without_effect": (9, STRING),
    },
    "ControlMessage": {"trace_id": (1, STRING), "command": (2, STRING), "payload": (3, MESSAGE)},
    "WorkerHealthRequest": {"trace_id": (1, STRING)},
    "WorkerHealthResponse": {"healthy": (1, BOOL), "metrics": (2, MESSAGE)},
    "GenerateImageRequest": {
        "trace_id": (1, STRING), "model_id": (2, STRING), "prompt": (3, STRING), "negative_prompt": (4, STRING),
        "seed": (5, INT64), "steps": (6, UINT32), "guidance_scale": (7, DOUBLE), "width": (8, UINT32),
        "height": (9, UINT32), "sampler": (10, STRING), "previews": (11, UINT32), "priority": (12, INT32),
        "prompt_embeds": (13, MESSAGE), "additional_information": (14, MESSAGE),
        "cache_salt": (15, STRING),
    },
    "ClientTensor": {"data": (1, BYTES), "shape": (2, UINT32), "dtype": (3, STRING), "sha256": (4, STRING)},
    "InformationEntry": {"tensor": (1, MESSAGE), "values": (2, MESSAGE)},
    "InformationValues": {"values": (1, MESSAGE)},
    "InformationValue": {"truth": (1, BOOL), "integer": (2, INT64), "number": (3, DOUBLE), "text": (4, STRING)},
    "GenerateImageUpdate": {
        "trace_id": (1, STRING), "index": (2, UINT32), "step": (3, UINT32), "steps": (4, UINT32), "image": (5, BYTES),
        "end_of_stream": (6, BOOL), "elapsed_ms": (7, FLOAT), "seed": (8, INT64),
    },
}  # fmt: skip


def test_numbers_and_types_are_frozen() -> None:
    messages = ai_service_pb2.DESCRIPTOR.message_types_by_name
    assert {
        name: {field.name: (field.number, field.type) for field in message.fields} for name, message in messages.items()
    } == FIELDS
    for message, field in (
        ("StreamMetadata", "extra"),
        ("ControlMessage", "payload"),
        ("WorkerHealthResponse", "metrics"),
    ):
        entry = messages[message].fields_by_name[field].message_type
        assert entry.GetOptions().map_entry
        assert [part.type for part in entry.fields] == [STRING, STRING]


def test_the_service_is_frozen() -> None:
    service = ai_service_pb2.DESCRIPTOR.services_by_name["AiInference"]
    assert service.full_name == "cy.llm.AiInference"
    assert {
        method.name: (method.input_type.name, method.client_streaming, method.output_type.name, method.server_streaming)
        for method in service.methods
    } == {
        "StreamPredict": ("StreamPredictRequest", True, "StreamPredictResponse", True),
        "Control": ("ControlMessage", False, "ControlMessage", False),
        "Health": ("WorkerHealthRequest", False, "WorkerHealthResponse", False),
        "GenerateImage": ("GenerateImageRequest", False, "GenerateImageUpdate", True),
    }


def test_the_generated_code_is_that_of_the_proto_file(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{ROOT}",
        f"--python_out={tmp_path}",
        f"--pyi_out={tmp_path}",
    ]
    subprocess.run([*command, PROTO], check=True, cwd=ROOT)
    for name in ("ai_service_pb2.py", "ai_service_pb2.pyi"):
        made, kept = tmp_path / "weft/api/grpc" / name, ROOT / "weft/api/grpc" / name
        assert made.read_text() == kept.read_text(), "run `make proto`"


def old_stub(name: str) -> Any:
    """A message class as an old stub has it: the same fields, none of them optional."""
    file = descriptor_pb2.FileDescriptorProto()
    ai_service_pb2.DESCRIPTOR.CopyToProto(file)
    for message in file.message_type:
        message.ClearField("oneof_decl")
        for field in message.field:
            field.ClearField("oneof_index")
            field.ClearField("proto3_optional")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"cy.llm.{name}"))


def test_a_client_with_an_old_stub_is_answered() -> None:
    request, response = old_stub("StreamPredictRequest"), old_stub("StreamPredictResponse")
    asked = request(
        model_id="default",
        prompt="hi",
        priority=3,
        generation={"max_new_tokens": 5, "temperature": 0.0, "top_p": 0.5},
        metadata={"trace_id": "old", "tenant": "t", "extra": {"a": "b"}},
        worker_hint="anywhere",
    )

    async def scenario() -> None:
        engine = ScriptedEngine()
        async with served(engine) as opened:
            call = opened.channel.stream_stream(STREAM_PREDICT, request.SerializeToString, response.FromString)([asked])
            answers = [answer async for answer in call]
        assert "".join(answer.chunk for answer in answers) == "Hello, world"
        assert [answer.trace_id for answer in answers] == ["old"] * len(answers)
        assert answers[-1].end_of_stream
        params = engine.submitted[0].params
        # An old stub cannot say 0: what it leaves out has its default.
        assert (params.max_tokens, params.temperature, params.top_p) == (5, 1.0, 0.5)

    asyncio.run(scenario())


def test_many_fields_are_counted_before_they_are_parsed() -> None:
    """Also where they stand in a message inside, and whatever follows them."""
    many = ai_service_pb2.StreamMetadata(extra={str(i): "" for i in range(5000)}).SerializeToString()
    inside = ai_service_pb2.StreamPredictRequest(prompt="x" * 1_000_000).SerializeToString()
    inside += b"\x32" + varint(len(many)) + many
    for message in (b"\x2a\0" * 200_000, inside, inside + b"\xff" * 11, b"\x0b" * 300_000):
        with pytest.raises(InvalidRequest, match="The StreamPredictRequest has more than 10000 fields"):
            parse(ai_service_pb2.StreamPredictRequest, message)


def test_long_messages_of_few_fields_are_parsed() -> None:
    request = ai_service_pb2.StreamPredictRequest(prompt="x" * 1_000_000)
    request.metadata.extra.update({str(i): "a" * 100 for i in range(1000)})
    assert parse(ai_service_pb2.StreamPredictRequest, request.SerializeToString()) == request
    for cut in (10, 1000, 900_000):
        with pytest.raises(InvalidRequest, match="What was sent is not a StreamPredictRequest"):
            parse(ai_service_pb2.StreamPredictRequest, request.SerializeToString()[:-cut])
