"""Requests that are too much: every field of every endpoint, very long, very many, very deep or very wide, made from
the server's own description and, for gRPC, from the messages' descriptors; queries, headers and metadata too. One table
of shapes serves all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from urllib.parse import quote

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from msgspec import Struct

from tests.e2e import hostile_rpc
from tests.e2e.hostile import BASES, FOR_OPERATORS, OPERATORS, Asked, Json
from tests.e2e.hostile_rpc import AskedRpc

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

    def asked(self) -> Asked:
        """The least that the route takes, with the value at its place."""
        body: Json = json.loads(json.dumps((BASES | OPERATORS)[self.path]))
        target, steps = body, [*self.place]
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            if following is None:
                target[step] = _HOLE
                break
            wanted = list if isinstance(following, int) else dict
            there = target.get(step) if isinstance(step, str) else target[step]
            if not isinstance(there, wanted):
                target[step] = [{}] if wanted is list else {}
            target = target[step]
        encoded = json.dumps(body).encode().replace(json.dumps(_HOLE).encode(), self.shape.json(self.size), 1)
        return Asked(self.path, encoded, headers=FOR_OPERATORS if self.path in OPERATORS else ())

    def __str__(self) -> str:
        where = ".".join(map(str, self.place))
        return f"POST {self.path} {where}: {self.shape.name}, {self.size} bytes"


def places_of(openapi: Json) -> dict[str, list[Place]]:
    """Every field of every route that takes a body, the fields of what is inside them too, and one that is unknown."""
    found: dict[str, list[Place]] = {}
    for path, methods in openapi["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in content:
            schema = content["application/json"]["schema"]
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
    operators: dict[str, list[Place]] = {path: [(name,) for name in base] for path, base in OPERATORS.items()}
    return [
        TooMuch(path, place, shape, size)
        for path, places in (places_of(openapi) | operators).items()
        for place in places
        for shape in SHAPES
        for size in sizes
    ]


STORED = "<stored>"
"""In a path: the id of a response that the server has kept."""
LONG_HEADS = (
    ("GET", "/v1/models/{}"),
    ("GET", "/v1/models?a={}"),
    ("GET", "/v1/responses/{}"),
    ("DELETE", "/v1/responses/{}"),
    ("GET", "/v1/responses/{}/input_items"),
    ("GET", "/v1/responses/resp_0?stream={}"),
    ("GET", f"/v1/responses/{STORED}/input_items?limit={{}}"),
    ("GET", f"/v1/responses/{STORED}/input_items?order={{}}"),
    ("GET", f"/v1/responses/{STORED}/input_items?after={{}}"),
    ("GET", f"/v1/responses/{STORED}?include={{}}"),
    ("GET", "/metrics?{}"),
    ("GET", "/health?{}=1"),
    ("POST", "/admin/cache/reset?model={}"),
    ("POST", "/admin/profile/stop?model={}"),
    ("PATCH", "/{}"),
)
HEADERS = (
    "Authorization", "X-Request-Id", "Traceparent", "Content-Type", "Origin", "Cookie", "Accept", "Expect",
    "Anthropic-Version", "X-Api-Key", "X-No-Such",
)  # fmt: skip


def heads(sizes: tuple[int, ...]) -> Iterator[Asked]:
    """Paths, queries and headers that are very long or very many, or have what does not belong there."""
    texts = [quote(shape.text(size))[:size] for shape in SHAPES if shape.text is not None for size in sizes]
    for method, path in LONG_HEADS:
        key = FOR_OPERATORS if path.startswith("/admin") else ()
        for text in (*texts, "", "%00", "-1", "0", "000001", "1e3", "%ff", "%F0%9F%A7%B5", "..%2f..%2fx"):
            yield Asked(path.replace("{}", text), method=method, headers=key)
        for size in sizes:
            many = "&".join(f"k{n}=1" for n in range(size // 8))
            yield Asked(f"{path.replace('{}', '1')}{'&' if '?' in path else '?'}{many}", method=method, headers=key)
    for name in HEADERS:
        for text in (*texts, "", "a\x7f", "ü", "'\"", "Bearer", "Bearer ", "100-continue"):
            yield Asked("/v1/models", method="GET", headers=((name, text),))
        for count in (50, 200, 2000):
            yield Asked("/v1/models", method="GET", headers=((name, "a"),) * count)


class TooMuchRpc(Struct, frozen=True):
    """A field that is text has the shape's; of any other there are very many, and an unknown one may be very deep."""

    method: str
    place: tuple[str, ...]
    shape: Shape
    size: int

    def asked(self) -> AskedRpc:
        base = hostile_rpc.BASES[self.method]
        added = _wire(base.DESCRIPTOR, self.place, self.shape, self.size)
        return AskedRpc(self.method, base.SerializeToString() + added)

    def __str__(self) -> str:
        return f"{self.method} {'.'.join(self.place)}: {self.shape.name}, {self.size} bytes"


UNKNOWN, DEEP = "no such field", "groups within groups"
_MANY = Shape("many", lambda size: b"1" * size)
_ENTRY = "negative_prompt_embeds"
_MAX_NUMBER = b"\xff\xff\xff\xff\x0f"


def rpc_corpus(sizes: tuple[int, ...]) -> list[TooMuchRpc]:
    return [
        TooMuchRpc(method, place, shape, size)
        for method, base in hostile_rpc.BASES.items()
        for place, is_text in [*_rpc_places(base.DESCRIPTOR), ((UNKNOWN,), True), ((DEEP,), False)]
        for shape in (SHAPES if is_text else (_MANY,))
        if shape.text is not None or shape is _MANY
        for size in sizes
    ]


def rpc_heads(sizes: tuple[int, ...]) -> Iterator[AskedRpc]:
    for method, base in hostile_rpc.BASES.items():
        message = base.SerializeToString()
        for size in sizes:
            for name in ("x-no-such", "authorization", "traceparent", "x-request-id"):
                yield AskedRpc(method, message, ((name, "x" * size),))
            yield AskedRpc(method, message, tuple((f"k{n}", "1") for n in range(size // 32)))


def _rpc_places(descriptor: Descriptor) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Every field, with whether it is text."""
    for field in descriptor.fields:
        yield (field.name,), not field.is_repeated and field.cpp_type == FieldDescriptor.CPPTYPE_STRING
        inner = _message_in(field)
        if inner is not None:
            yield from (((field.name, *place), is_text) for place, is_text in _rpc_places(inner))


def _message_in(field: FieldDescriptor) -> Descriptor | None:
    """The message that a field holds; of a map with messages, that of its values."""
    inner = field.message_type
    if inner is None or not inner.GetOptions().map_entry:
        return inner
    return inner.fields_by_name["value"].message_type


def _wire(descriptor: Descriptor, place: tuple[str, ...], shape: Shape, size: int) -> bytes:
    """The bytes of the field. They are put together by hand: millions of Python's objects would take long to make."""
    if place == (DEEP,):
        return _tag(1000, 3) * (size // 2)
    if place == (UNKNOWN,):
        return _delimited(1000, _text_of(shape, size))
    field = descriptor.fields_by_name[place[0]]
    if len(place) > 1:
        inner = _message_in(field)
        assert inner is not None
        value = _wire(inner, place[1:], shape, size)
        is_map = inner is not field.message_type
        return _delimited(field.number, _delimited(1, _ENTRY.encode()) + _delimited(2, value) if is_map else value)
    if shape is not _MANY:
        return _delimited(field.number, _text_of(shape, size))
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entries = (_delimited(field.number, _delimited(1, b"%08d" % n) + b"\x12\0") for n in range(size // 14))
        return b"".join(entries)
    if field.message_type is not None or field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _delimited(field.number, b"") * (size // 2)
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return (_tag(field.number, 1) + bytes(8)) * (size // 9)
    if field.is_repeated:
        return _delimited(field.number, _MAX_NUMBER * (size // 5))
    return (_tag(field.number, 0) + b"\x01") * (size // 2)


def _text_of(shape: Shape, size: int) -> bytes:
    assert shape.text is not None
    return shape.text(size).encode()


def _delimited(number: int, value: bytes) -> bytes:
    return _tag(number, 2) + varint(len(value)) + value


def _tag(number: int, kind: int) -> bytes:
    return varint(number << 3 | kind)


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
