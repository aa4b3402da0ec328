"""Messages that no client should send, over gRPC: every field of every method alone, pairs of fields, and bytes that
are no message."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from msgspec import Struct

from tests.e2e.tiny_server import NAME
from tests.tiny_models import SPECIAL_TOKENS
from weft.api.grpc.ai_service_pb2 import (
    ClientTensor,
    ControlMessage,
    GenerateImageRequest,
    GenerationParameters,
    InformationEntry,
    InformationValue,
    InformationValues,
    PromptSegment,
    StreamMetadata,
    StreamPredictRequest,
    TokenIds,
    WorkerHealthRequest,
)

STRINGS = (
    "",
    " ",
    "\0",
    "a\0b",
    "x" * 100_000,
    "\ufeff\u202e",
    "".join(SPECIAL_TOKENS),
    "default",
    "../../x",
    "ü" * 257,
)
DOUBLES = (float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 5e-324, -0.0, 0.0, -1.0, 0.5, 1.0, 100.0, 100.1)
VALUES: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.CPPTYPE_STRING: STRINGS,
    FieldDescriptor.CPPTYPE_DOUBLE: DOUBLES,
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 127, 128, 2**31 - 1, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT32: (0, -1, -(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (0, -1, -(2**63), 2**63 - 1),
}

TENSOR = ClientTensor(data=bytes(4 * 96), shape=(1, 96), dtype="float32")
MANY_VALUES = InformationValues(values=[InformationValue(text="a")] * 3000)
LIKELY: dict[str, tuple[Any, ...]] = {
    "command": ("ping", "list_models", "load_model", "unload_model", "reload_registry", *STRINGS),
    "payload": ({}, {"model_id": NAME}, {"model_id": "x" * 10_000}, {"": "\0"}),
    "extra": ({"a": "b"}, {"": "\0"}, {str(i): "" for i in range(3000)}),
    "segments": (
        (PromptSegment(text="over"), PromptSegment(prompt_embeds=TENSOR), PromptSegment(token_ids=TokenIds(ids=[5]))),
        (PromptSegment(), PromptSegment(text="")),
        (PromptSegment(token_ids=TokenIds(ids=[2**32 - 1])),),
        (PromptSegment(prompt_embeds=ClientTensor(data=b"\xff" * 384, shape=(1, 96), dtype="float32")),),
        (PromptSegment(text="a"),) * 3000,
        (PromptSegment(token_ids=TokenIds(ids=[1] * 100_000)),),
    ),
    "steps": (0, 1, 3, 20, 1001, 2**32 - 1),
    "sampler": ("euler", "heun", *STRINGS),
    "data": (b"", bytes(384), b"\xff" * 384, bytes(100_000)),
    "shape": ((), (1, 96), (0, 0), (2**32 - 1,) * 2, (2**32 - 1,) * 3000, (1,) * 3000),
    "dtype": ("float32", "float16", "bfloat16", *STRINGS),
    "prompt_embeds": (
        TENSOR,
        ClientTensor(data=b"\xff" * 384, shape=(1, 96), dtype="float32"),
        ClientTensor(data=bytes(192), shape=(1, 96), dtype="bfloat16", sha256="0"),
    ),
    "additional_information": (
        {"negative_prompt_embeds": InformationEntry(tensor=TENSOR)},
        {"negative_prompt_embeds": InformationEntry()},
        {"negative_prompt_embeds": InformationEntry(values=MANY_VALUES)},
        {str(i): InformationEntry() for i in range(3000)},
    ),
}  # fmt: skip
"""Values of fields that are more than one value, and values that get further in."""

BASES: dict[str, Message] = {
    "StreamPredict": StreamPredictRequest(
        prompt="over",
        generation=GenerationParameters(max_new_tokens=3, temperature=0.5),
        metadata=StreamMetadata(trace_id="t"),
    ),
    "GenerateImage": GenerateImageRequest(prompt="over", steps=2),
    "Control": ControlMessage(command="ping", trace_id="t"),
    "Health": WorkerHealthRequest(),
}
"""The least that each method takes."""

Field = tuple[str, ...]
"""Where it is: the names from the message down."""


class AskedRpc(Struct, frozen=True):
    method: str
    message: bytes
    metadata: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        metadata = f" with {len(self.metadata)} of metadata {str(self.metadata)[:100]}" if self.metadata else ""
        return f"{self.method}{metadata}: {len(self.message)} bytes {self.message[:300]!r}"


def fields_of(descriptor: Descriptor) -> dict[Field, tuple[Any, ...]]:
    """Every field, also of the messages inside, with the values to try."""
    found: dict[Field, tuple[Any, ...]] = {}
    for field in descriptor.fields:
        if field.name in LIKELY:
            found[(field.name,)] = LIKELY[field.name]
        elif field.cpp_type in VALUES:
            found[(field.name,)] = VALUES[field.cpp_type]
        if field.message_type is not None and not field.is_repeated:
            inner = fields_of(field.message_type)
            found |= {(field.name, *place): values for place, values in inner.items()}
    return found


def request(method: str, changes: dict[Field, Any]) -> AskedRpc:
    message = type(BASES[method])()
    message.CopyFrom(BASES[method])
    for (*path, name), value in changes.items():
        target: Any = message
        for step in path:
            target = getattr(target, step)
        _set(target, name, value)
    return AskedRpc(method, message.SerializeToString())


def _set(target: Any, name: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, Message):
                getattr(target, name)[key].CopyFrom(item)
            else:
                getattr(target, name)[key] = item
    elif isinstance(value, tuple):
        getattr(target, name).extend(value)
    elif isinstance(value, Message):
        getattr(target, name).CopyFrom(value)
    else:
        setattr(target, name, value)


def alone() -> Iterator[AskedRpc]:
    for method, base in BASES.items():
        for field, values in fields_of(base.DESCRIPTOR).items():
            for value in values:
                yield request(method, {field: value})


def in_pairs(rng: random.Random) -> Iterator[AskedRpc]:
    """Each pair of a method's fields once."""
    for method, base in BASES.items():
        fields = fields_of(base.DESCRIPTOR)
        for first, second in itertools.combinations(fields, 2):
            yield request(method, {first: rng.choice(fields[first]), second: rng.choice(fields[second])})


def broken(rng: random.Random, method: str) -> AskedRpc:
    """Bytes at random, or a message with a byte changed or its end cut off."""
    good = request(method, {}).message or b"\x0a\x01t"
    changed = bytearray(good)
    changed[rng.randrange(len(good))] = rng.randrange(256)
    return AskedRpc(
        method, rng.choice((rng.randbytes(rng.randrange(40)), bytes(changed), good[: rng.randrange(len(good))]))
    )
