"""What the output of a request must be, when that is not left to the model."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.errors import InvalidRequest
from weft.frontend.schemas import ChatRequest, GenerationRequest
from weft.frontend.toolbox import Toolbox
from weft.text.grammars.specs import Choice, GrammarSpec, JsonObject, JsonSchema, Lark, Regex, ToolCalls, ToolSpec


def structured_shape(request: GenerationRequest) -> GrammarSpec | None:
    asked, field = request.structured_outputs, "structured_outputs"
    if asked is None:
        return None
    if asked.json_ is not None:
        return JsonSchema(schema=_schema(asked.json_, f"{field}.json"), param=f"{field}.json")
    if asked.regex is not None:
        return Regex(pattern=asked.regex, param=f"{field}.regex")
    if asked.choice is not None:
        return Choice(options=asked.choice, param=f"{field}.choice")
    if asked.grammar is not None:
        return Lark(text=asked.grammar, param=f"{field}.grammar")
    return JsonObject(param=field)


def chat_shape(request: ChatRequest, tools: Toolbox) -> GrammarSpec | None:
    asked = [shape for shape in (_response_format(request), structured_shape(request)) if shape is not None]
    if len(asked) > 1:
        raise InvalidRequest("response_format and structured_outputs both say what to write.", param="response_format")
    if asked and tools.must_call:
        raise InvalidRequest("A call that is forced leaves no room for another format.", param=asked[0].param)
    if asked:
        return asked[0]
    if tools.style is None:
        return None
    return _calls(request, tools, at_least_one=True) if tools.must_call else _strict_calls(request, tools)


def _response_format(request: ChatRequest) -> GrammarSpec | None:
    asked = request.response_format
    if asked is None or asked.type == "text":
        return None
    if asked.json_schema is None:
        return JsonObject(param="response_format")
    return JsonSchema(schema=asked.json_schema.schema_, param="response_format.json_schema.schema")


def _strict_calls(request: ChatRequest, tools: Toolbox) -> GrammarSpec | None:
    """Nothing is forced, but a call must fit the schema of a tool that says so."""
    return _calls(request, tools, at_least_one=False) if any(tool.function.strict for tool in tools.offered) else None


def _calls(request: ChatRequest, tools: Toolbox, *, at_least_one: bool) -> ToolCalls:
    assert tools.style is not None
    callable_tools = [tools.named] if tools.named is not None else tools.offered
    return ToolCalls(
        shape=tools.style.shape,
        tools=[ToolSpec(name=tool.function.name, parameters=tool.function.parameters) for tool in callable_tools],
        at_least_one=at_least_one,
        parallel=request.parallel_tool_calls and tools.named is None,
    )


def _schema(given: dict[str, Any] | str, param: str) -> dict[str, Any]:
    """Some clients send the schema as JSON text."""
    try:
        schema = msgspec.json.decode(given) if isinstance(given, str) else given
    except ValueError as error:
        raise InvalidRequest(f"The schema is not valid JSON: {error}.", param=param) from error
    if not isinstance(schema, dict):
        raise InvalidRequest("The schema must be a JSON object.", param=param)
    return schema
