"""JSON schemas of every kind that a grammar enforces, by name. Strings and lists have bounds, so that outputs end."""

from __future__ import annotations

from typing import Any


def _object(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object whose properties are all required, and that has no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


WORD = {"type": "string", "maxLength": 8}
SMALL = {"type": "integer", "minimum": 0, "maximum": 99}

SCHEMAS: dict[str, dict[str, Any]] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer in a range": {"type": "integer", "minimum": -5, "maximum": 120},
    "integer above": {"type": "integer", "exclusiveMinimum": 0, "maximum": 1000},
    "integer of seven": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "number in a range": {"type": "number", "minimum": 0, "maximum": 1},
    "number between": {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
    "number in cents": {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 10},
    "short string": {"type": "string", "maxLength": 5},
    "string of three": {"type": "string", "minLength": 3, "maxLength": 3},
    "empty string": {"type": "string", "maxLength": 0},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern somewhere": {"type": "string", "pattern": "ab", "maxLength": 6},
    "pattern of digits": {"type": "string", "pattern": r"^\d{3}-\d{4}$"},
    "date": {"type": "string", "format": "date"},
    "time of day": {"type": "string", "format": "time", "maxLength": 12},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": {"type": "string", "format": "email", "maxLength": 16},
    "enum of strings": {"enum": ["red", "green", "blue"]},
    "enum of kinds": {"enum": [1, "one", None, True, [1, 2], {"a": 1}]},
    "enum with a type": {"type": "string", "enum": ["a", "b", 3]},
    "const": {"const": "fixed"},
    "const object": {"const": {"a": [1, {"b": None}], "c": "d"}},
    "unicode": {"enum": ["naïve", "世界", "🎉", 'quote " and \\', "line\nbreak"]},
    "unicode names": _object(größe=SMALL, 名前=WORD),
    "object": _object(name=WORD, age=SMALL),
    "object with optional parts": {
        "type": "object",
        "properties": {"a": SMALL, "b": WORD, "c": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "empty object": {"type": "object", "properties": {}, "additionalProperties": False},
    "nested object": _object(person=_object(name=WORD, address=_object(city=WORD, zip=SMALL))),
    "map": {"type": "object", "additionalProperties": SMALL, "minProperties": 1, "maxProperties": 2},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": SMALL},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "list": {"type": "array", "items": SMALL, "minItems": 1, "maxItems": 4},
    "list of exactly three": {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3},
    "empty list": {"type": "array", "maxItems": 0},
    "tuple": {"type": "array", "prefixItems": [SMALL, WORD, {"type": "null"}], "items": False, "minItems": 3},
    "list of objects": {"type": "array", "items": _object(id=SMALL, ok={"type": "boolean"}), "maxItems": 2},
    "list of lists": {"type": "array", "items": {"type": "array", "items": SMALL, "maxItems": 2}, "maxItems": 2},
    "any of": {"anyOf": [{"type": "boolean"}, SMALL, _object(x=SMALL)]},
    "one of": {"oneOf": [{"type": "boolean"}, SMALL, WORD]},
    "one of by a tag": {
        "oneOf": [
            _object(kind={"const": "circle"}, radius=SMALL),
            _object(kind={"const": "square"}, side=SMALL),
        ]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": SMALL}, "required": ["a"]},
            {"type": "object", "properties": {"b": WORD}, "required": ["b"]},
        ],
        "properties": {"a": True, "b": True},
        "additionalProperties": False,
    },
    "all of numbers": {"type": "integer", "allOf": [{"minimum": 10}, {"maximum": 20}]},
    "nullable": {"type": ["string", "null"], "maxLength": 4},
    "nullable by choice": {"anyOf": [SMALL, {"type": "null"}]},
    "several types": {"type": ["boolean", "integer"], "minimum": 0, "maximum": 9},
    "definitions": {
        **_object(home={"$ref": "#/$defs/place"}, work={"$ref": "#/$defs/place"}),
        "$defs": {"place": _object(street=WORD, number=SMALL)},
    },
    "old definitions": {
        "definitions": {"n": SMALL},
        "type": "array",
        "items": {"$ref": "#/definitions/n"},
        "maxItems": 3,
    },
    "recursive tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": SMALL,
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "recursive list": {
        "$defs": {
            "cell": _object(head=SMALL, tail={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/cell"}]}),
        },
        "$ref": "#/$defs/cell",
    },
    "reference with more": {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 5, "maximum": 8},
    "notes beside": {"title": "T", "description": "d", "default": 1, "x-order": 3, "deprecated": True, **SMALL},
}

FOR_A_MODEL = [
    "object",
    "nested object",
    "list of objects",
    "one of by a tag",
    "reference with more",
    "enum of strings",
    "unicode names",
    "definitions",
    "date",
    "object with optional parts",
]
"""Names of schemas of every kind, for a real model."""
