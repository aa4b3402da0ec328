"""Bodies that are too much: every field of every endpoint, very long, very many, very deep or very wide, made from the
server's own description and, for gRPC, from the messages' descriptors. One table of shapes serves both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from msgspec import Struct

from tests.e2e.hostile import BASES, Json
from tests.e2e.tiny_server import NAME
from weft.api.grpc.ai_service_pb2 import StreamPredictRequest

Place = tuple[str | int, ...]
"""Where a field is: names and indexes from the body down."""

MAX_DEPTH = 5
_HOLE = "\x02"


class Shape(Struct, frozen=True):
    """A value of about so many bytes."""

    name: str
    json: Callable[[int], bytes]
    text: Callable[[int], str] | None = None
    """The same as a string, where it is one."""


def _text(name: str, unit: str) -> Shape:
    def text(size: int) -> str:
        return unit * (size // len(unit.encode()))

    return Shape(name, lambda size: json.dumps(text(size), ensure_ascii=False).encode(), text)


def _many(name: str, item: bytes) -> Shape:
    return Shape(name, lambda size: b"[" + b",".join([item] * (size // (len(item) + 1))) + b"]")


SHAPES = (
    _text("long", "x"),
    _text("lines", "\n"),
    _text("words", "weave "),
    _text("wide characters", "織"),
    _text("backslashes", "\\"),
    _text("brackets", "(["),
    _text("zeros", "0"),
    _many("numbers", b"1"),
    _many("wrong numbers", b"-1.5"),
    _many("strings", b'"a"'),
    _many("nulls", b"null"),
    _many("lists", b"[1]"),
    _many("objects", b"{}"),
    _many("messages", b'{"role":"user","content":"a"}'),
    Shape("a number", lambda size: b"9" * size),
    Shape("deep lists", lambda size: b"[" * (size // 2) + b"]" * (size // 2)),
    Shape("deep objects", lambda size: b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6)),
    Shape("many keys", lambda size: b"{" + b",".join(b'"k%d":1' % n for n in range(size // 12)) + b"}"),
    Shape("a long key", lambda size: b'{"' + b"k" * size + b'":1}'),
    Shape("the same key", lambda size: b"{" + b",".join([b'"k":1'] * (size // 6)) + b"}"),
)


class TooMuch(Struct, frozen=True):
    path: str
    place: Place
    shape: Shape
    size: int

    def body(self) -> bytes:
        """The least that the route takes, with the value at its place."""
        body: Json = {"model": NAME, **json.loads(json.dumps(BASES[self.path]))}
        target, steps = body, [*self.place]
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            if following is None:
                target[step] = _HOLE
            elif isinstance(step, str) and not isinstance(target.get(step), list if following == 0 else dict):
                target[step] = [{}] if following == 0 else {}
            elif isinstance(step, int) and not isinstance(target[step], dict):
                target[step] = {}
            target = target[step]
        return json.dumps(body).encode().replace(json.dumps(_HOLE).encode(), self.shape.json(self.size), 1)

    def __str__(self) -> str:
        where = ".".join(map(str, self.place))
        return f"POST {self.path} {where}: {self.shape.name}, {self.size} bytes"


def places_of(openapi: Json) -> dict[str, list[Place]]:
    """Every field of every route that takes a body, the fields of what is inside them too, and one that is unknown."""
    found: dict[str, list[Place]] = {}
    for path, methods in openapi["paths"].items():
        if "post" in methods:
            schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            places = dict.fromkeys(_places(schema, openapi["components"]["schemas"], ()))
            found[path] = [*places, ("no_such_field",)]
    return found


def _places(schema: Json, named: Json, at: Place) -> Iterator[Place]:
    if at:
        yield at
    if len(at) >= MAX_DEPTH:
        return
    if "$ref" in schema:
        schema = named[schema["$ref"].rpartition("/")[2]]
    for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from (place for place in _places(inner, named, at) if place != at)
    for name, inner in schema.get("properties", {}).items():
        yield from _places(inner, named, (*at, name))
    if isinstance(items := schema.get("items"), dict):
        yield from _places(items, named, (*at, 0))


def corpus(openapi: Json, sizes: tuple[int, ...]) -> list[TooMuch]:
    return [
        TooMuch(path, place, shape, size)
        for path, places in places_of(openapi).items()
        if path in BASES
        for place in places
        for shape in SHAPES
        for size in sizes
    ]


class TooMuchRpc(Struct, frozen=True):
    place: tuple[str, ...]
    shape: Shape
    size: int

    def body(self) -> bytes:
        message = StreamPredictRequest(prompt="over")
        message.generation.max_new_tokens = 3
        target: Any = message
        for step in self.place[:-1]:
            target = getattr(target, step)
        name = self.place[-1]
        field = target.DESCRIPTOR.fields_by_name[name]
        assert self.shape.text is not None
        text = self.shape.text(self.size)
        if field.message_type is not None:  # a map
            entries = getattr(target, name)
            entries[text] = ""
            entries.update({f"{text[:8]}{n}": text[:8] for n in range(self.size // 24)})
        elif field.is_repeated:
            getattr(target, name).extend([text[:8]] * (self.size // 10))
        else:
            setattr(target, name, text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text)
        return message.SerializeToString()

    def __str__(self) -> str:
        return f"StreamPredict {'.'.join(self.place)}: {self.shape.name}, {self.size} bytes"


def rpc_corpus(sizes: tuple[int, ...]) -> list[TooMuchRpc]:
    return [
        TooMuchRpc(place, shape, size)
        for place in _rpc_places(StreamPredictRequest.DESCRIPTOR)
        for shape in SHAPES
        if shape.text is not None
        for size in sizes
    ]


def _rpc_places(descriptor: Descriptor) -> Iterator[tuple[str, ...]]:
    for field in descriptor.fields:
        inner = field.message_type
        if inner is not None and not inner.GetOptions().map_entry:
            yield from ((field.name, *place) for place in _rpc_places(inner))
        elif inner is not None or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            yield (field.name,)
