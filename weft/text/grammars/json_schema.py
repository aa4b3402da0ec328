"""Checks JSON schemas: a keyword that the grammar cannot enforce is refused by name and place.

llguidance ignores keywords that it does not know, and takes some in a way that an output may fail the schema. What it
does refuse by itself (formats, references, contradictions) is left to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.errors import InvalidRequest, shortened

_OF_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose values are objects of schemas."""
_OF_MANY = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
"""Keywords whose values are lists of schemas."""
_OF_ONE = frozenset({"additionalProperties", "additionalItems", "items"})
"""Keywords whose value is a schema; `items` in old drafts is also a list of them."""
_CONSTRAINTS = frozenset(
    {
        "$ref", "const", "enum", "type", "required", "pattern", "format", "multipleOf",
        "minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    }
)  # fmt: skip
_NOTES = frozenset(
    {
        "$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default", "examples", "deprecated",
        "readOnly", "writeOnly", "contentMediaType", "contentEncoding",
    }
)  # fmt: skip
"""Annotations: they do not restrict what fits."""
_KNOWN = _OF_NAMES | _OF_MANY | _OF_ONE | _CONSTRAINTS | _NOTES


Place = tuple["Place", str] | None
"""Where a schema stands: in which other one, and at which of its keywords; written out only for an error."""


def check_schema(schema: Mapping[str, Any], *, max_depth: int, param: str) -> None:
    """Raise InvalidRequest for a schema that is too deep, or asks what the grammar would not enforce."""
    waiting: list[tuple[Place, Any, int]] = [(None, schema, 1)]
    while waiting:
        place, part, depth = waiting.pop()
        if depth > max_depth:
            raise InvalidRequest(
                f"The schema is nested more than {max_depth} levels deep, at {_shown(place)}.",
                hint="The server's limit is --max-schema-depth.",
                param=param,
            )
        if isinstance(part, Mapping):
            _check_keywords(part, place, param)
            waiting += [((place, path), inner, depth + 1) for path, inner in _inner(part)]


def _shown(place: Place) -> str:
    steps: list[str] = []
    while place is not None:
        place, path = place
        steps.append(path)
    return shortened("".join(reversed(steps))) or "the top"


def _check_keywords(part: Mapping[str, Any], place: Place, param: str) -> None:
    unknown = sorted(name for name in part if name not in _KNOWN and not _is_extension(name))
    if unknown:
        raise InvalidRequest(
            f"Unsupported keywords in the schema at {_shown(place)}: {shortened(', '.join(unknown))}.",
            hint=f"Supported are: {', '.join(sorted(_KNOWN - _NOTES))}.",
            param=param,
        )
    required = part.get("required", ())
    least, num_required = part.get("minProperties", 0), len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > num_required + 1:
        # Names that the schema does not list may be written twice: only one of them is sure to count.
        raise InvalidRequest(
            f"minProperties {least} at {_shown(place)} is above the {num_required} required properties by more than "
            "one.",
            hint="Name the properties that are required.",
            param=param,
        )
    if "additionalItems" in part and "prefixItems" in part:
        raise InvalidRequest(
            f"prefixItems and additionalItems stand together at {_shown(place)}; they belong to different drafts.",
            hint="Use items for what follows prefixItems.",
            param=param,
        )


def _is_extension(name: str) -> bool:
    """Return whether a key is an extension of llguidance: x-guidance would change how the schema is compiled."""
    return name.startswith("x-") and name != "x-guidance"


def _inner(part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas inside a schema, each with its place. The compiler reports values of the wrong type."""
    for name, value in part.items():
        if name in _OF_NAMES and isinstance(value, Mapping):
            yield from ((f"/{name}/{inner}", schema) for inner, schema in value.items())
        elif name in _OF_MANY | _OF_ONE and isinstance(value, list):
            yield from ((f"/{name}/{i}", schema) for i, schema in enumerate(value))
        elif name in _OF_ONE:
            yield f"/{name}", value
