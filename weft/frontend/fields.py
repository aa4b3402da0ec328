"""The rules for a request's fields that types alone do not say."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic_core import PydanticCustomError

NotYet = Mapping[str, Sequence[object]]
"""Fields by name, each with the values that ask for nothing and are let through."""


def without_empty_fields(value: Any, known: Collection[str], not_yet: NotYet) -> Any:
    """The object without its nulls and without what asks for nothing; refuses what Weft would have to ignore."""
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, item in value.items():
        if name in known:
            if item is not None:
                kept[name] = item
        elif name not in not_yet:
            raise PydanticCustomError(
                "unknown_field", "there is no such field.{hint}", {"field": name, "hint": _nearest(name, known)}
            )
        elif item is not None and not any(type(item) is type(empty) and item == empty for empty in not_yet[name]):
            raise PydanticCustomError(
                "not_supported", "{said} is not supported yet.", {"field": name, "said": _said(item)}
            )
    return kept


def with_empty_fields(schema: dict[str, Any], not_yet: NotYet) -> None:
    """Let an object's description say what is taken for nothing: null for a field that may be absent, and for one that
    is not supported yet whatever asks for nothing."""
    fields = schema.setdefault("properties", {})
    for name in fields.keys() - schema.get("required", ()):
        field = fields[name]
        if {"type": "null"} not in field.get("anyOf", ()):
            about = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            fields[name] = {"anyOf": [field, {"type": "null"}], **about}
    fields |= {name: {"enum": [None, *empty], "description": "Not supported yet."} for name, empty in not_yet.items()}


def content_text(value: object) -> str:
    """A message's content: a string, or text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("it must be a string or a list of text parts.")
    return "\n".join(_part_text(part, index) for index, part in enumerate(value))


def prompts(value: object) -> list[str | list[int]]:
    """One prompt or several, each a string or a list of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("it must be a string, a list of strings, a list of token ids, or a list of such lists.")
    if _are_token_ids(value):
        return [value]
    if all(isinstance(item, str) for item in value):
        return value
    if all(isinstance(item, list) and item and _are_token_ids(item) for item in value):
        return value
    raise ValueError("its elements must be all strings, all token ids, or all lists of token ids.")


def stop_strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("it must be a string or a list of strings.")


def _are_token_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


def _part_text(part: object, index: int) -> str:
    if not isinstance(part, dict):
        raise ValueError(f"part {index} must be an object with a type.")
    if part.get("type") != "text":
        raise ValueError(f"part {index} is of type {part.get('type')!r}; only 'text' is supported yet.")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"part {index} has no text.")
    if other := sorted(part.keys() - {"type", "text"}):
        raise ValueError(f"part {index} has a field that there is not: {other[0]!r}.")
    text: str = part["text"]
    return text


def _nearest(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def _said(value: object) -> str:
    """The value when it is short enough to name."""
    return repr(value) if isinstance(value, str | int | float) and len(repr(value)) < 40 else "it"
