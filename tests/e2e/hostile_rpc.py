"""Messages that no client should send, over gRPC: every field alone, every pair of fields, and bytes that are none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tests.tiny_models import SPECIAL_TOKENS
from weft.api.grpc.ai_service_pb2 import ControlMessage, StreamPredictRequest

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
}

Field = tuple[str, ...]
"""Where it is: the names from the message down."""


def fields_of(descriptor: Descriptor) -> dict[Field, tuple[Any, ...]]:
    """Every plain field, also of the messages inside, with the values to try."""
    found: dict[Field, tuple[Any, ...]] = {}
    for field in descriptor.fields:
        if field.cpp_type in VALUES and not field.is_repeated:
            found[(field.name,)] = VALUES[field.cpp_type]
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            inner = fields_of(field.message_type)
            found |= {(field.name, *place): values for place, values in inner.items()}
    return found


def request(changes: dict[Field, Any]) -> bytes:
    message = StreamPredictRequest(prompt="over")
    message.generation.max_new_tokens = 3
    for (*path, name), value in changes.items():
        target: Any = message
        for step in path:
            target = getattr(target, step)
        setattr(target, name, value)
    return message.SerializeToString()


def alone() -> Iterator[bytes]:
    for field, values in fields_of(StreamPredictRequest.DESCRIPTOR).items():
        for value in values:
            yield request({field: value})


def in_pairs(rng: random.Random, rounds: int) -> Iterator[bytes]:
    fields = fields_of(StreamPredictRequest.DESCRIPTOR)
    for _ in range(rounds):
        for first, second in itertools.combinations(fields, 2):
            yield request({first: rng.choice(fields[first]), second: rng.choice(fields[second])})


def broken(rng: random.Random, count: int) -> Iterator[bytes]:
    """Bytes at random, and messages with a byte changed or their end cut off."""
    good = request({("metadata", "trace_id"): "t", ("generation", "temperature"): 0.5})
    for _ in range(count):
        changed = bytearray(good)
        changed[rng.randrange(len(good))] = rng.randrange(256)
        yield from (rng.randbytes(rng.randrange(40)), bytes(changed), good[: rng.randrange(len(good))])


def commands() -> Iterator[bytes]:
    for command in ("ping", "list_models", "unload_model", "reload_registry", *STRINGS):
        for payload in ({}, {"model": "x" * 10_000}, {"": "\0"}):
            yield ControlMessage(command=command, payload=payload, trace_id="t").SerializeToString()
