"""The rule for the fields of a request's body.

A schema has the fields that are honoured, `field_rules` those that are known and not honoured. What stands in neither
is unknown, and refused with the nearest name that is known.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationInfo, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from weft.api.field_rules import RULES, Rule
from weft.errors import shown
from weft.serving.request import FieldReport

MAX_NAME_CHARS = 64
"""No field has a longer name."""


VENDOR_TOOLS = re.compile(
    r"(advisor|apply_patch|bash|code_execution|code_interpreter|computer|computer_use|custom|file_search|"
    r"image_generation|local_shell|mcp|mcp_toolset|memory|namespace|shell|text_editor|tool_search(_tool\w{0,40})?|"
    r"web_fetch|web_search)(_preview)?(_[0-9]{4}_?[0-9]{2}_?[0-9]{2})?"
)
"""Types of tools that OpenAI and Anthropic publish beside functions: what they do is known to their models alone."""


def client_tools(own: str) -> Callable[[object, ValidationInfo], object]:
    """Return what takes the tools of a request that clients run, by their type, from those that only a vendor's model
    or server can use."""

    def is_left_aside(tool: object, report: FieldReport) -> bool:
        kind = tool.get("type", own) if isinstance(tool, dict) else own
        if kind == own or not isinstance(kind, str) or len(kind) > MAX_NAME_CHARS:
            return False
        is_known = VENDOR_TOOLS.fullmatch(kind) is not None
        if report.mode == "strict" or not (is_known or report.mode == "tolerant"):
            return False
        report.leave_aside(f"tools.tools.{kind}", known=is_known)
        return True

    def taken(value: object, info: ValidationInfo) -> object:
        report: FieldReport = info.context or FieldReport()
        return [tool for tool in value if not is_left_aside(tool, report)] if isinstance(value, list) else value

    return taken


class Fields(BaseModel):
    """An object of a request: types are strict, null means absent, and every field has a rule."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    place: ClassVar[str] = ""
    """Its place in `RULES`; empty: an object that no client sends by itself."""

    @model_validator(mode="before")
    @classmethod
    def _by_the_rules(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        known = [field.alias or name for name, field in cls.model_fields.items()]
        return honoured_fields(value, known, cls.place, info.context or FieldReport())

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        _describe(handler.resolve_ref_schema(schema), RULES.get(cls.place, {}))
        return schema


def honoured_fields(
    value: Mapping[str, Any], known: Collection[str], place: str, report: FieldReport
) -> dict[str, Any]:
    """Return an object's fields without its nulls and hints. Raises for what is impossible or unknown."""
    rules = RULES.get(place, {})
    kept = {}
    for name, item in value.items():
        if name in known:
            if item is not None:
                kept[name] = item
            continue
        rule = rules.get(name)
        if rule is None:
            if report.mode != "tolerant":
                refusal = {"field": name, "hint": nearest(name, [*known, *rules])}
                raise PydanticCustomError("unknown_field", "there is no such field.{hint}", refusal)
            report.leave_aside(f"{place}.{name}", known=False)
        elif item is not None and not rule.passes(item):
            if not rule.possible or report.mode == "strict":
                refusal = {"field": name, "said": _said(item), "why": rule.why}
                raise PydanticCustomError("not_supported", "{said} is not supported: {why}.", refusal)
            report.leave_aside(f"{place}.{name}")
    return kept


def nearest(name: str, known: Collection[str]) -> str:
    # The matcher takes quadratic time.
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5) if len(name) <= MAX_NAME_CHARS else ()
    return f" Did you mean {close[0]!r}?" if close else ""


def _describe(schema: dict[str, Any], rules: Mapping[str, Rule]) -> None:
    """Let an object's description say that null is taken for a field that may be absent, and which fields are hints."""
    fields = schema.setdefault("properties", {})
    for name in fields.keys() - schema.get("required", ()):
        field = fields[name]
        if {"type": "null"} not in field.get("anyOf", ()):
            about = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            fields[name] = {"anyOf": [field, {"type": "null"}], **about}
    for name, rule in rules.items():
        if rule.possible:
            fields.setdefault(name, {"description": f"Accepted without effect: {rule.why}."})
        else:
            fields.setdefault(name, {"enum": [None, *rule.neutral], "description": f"Not supported: {rule.why}."})


def _said(value: object) -> str:
    """Return the value when it is short enough to name."""
    return said if isinstance(value, str | int | float) and len(said := shown(value)) < 40 else "it"
