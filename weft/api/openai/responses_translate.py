"""A request to /v1/responses as the chat request that asks for the same; its items as messages, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.api.openai.openai_schema import ChatRequest
from weft.api.openai.responses_schema import (
    AllowedFunctions,
    AnyItem,
    AnyPart,
    CallOutput,
    ChosenTool,
    CustomCall,
    FunctionCall,
    InputMessage,
    PastReasoning,
    ResponsesRequest,
    ResponsesTool,
    TextFormat,
    offered_name,
)
from weft.errors import InvalidRequest
from weft.serving.output_reader import BlockKind, OutputBlock

ChatMessages = list[dict[str, Any]]

OWN_NAMES = {
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "tools.custom.format": "tools.format",
    "truncate_prompt_tokens": "truncation",
}
"""The names here of fields of the chat request."""


def chat_request(request: ResponsesRequest, conversation: ChatMessages) -> ChatRequest:
    """Return the chat request that asks for the same. `conversation`: all of it but this request's instructions."""
    system = [{"role": "system", "content": request.instructions}] if request.instructions is not None else []
    logprobs = bool(request.top_logprobs) or "message.output_text.logprobs" in request.include
    return ChatRequest.model_validate(
        {
            "model": request.model,
            "messages": system + conversation,
            "max_completion_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "presence_penalty": request.presence_penalty,
            "frequency_penalty": request.frequency_penalty,
            "seed": request.seed,
            "stream": request.stream,
            "tools": [_tool(tool) for tool in request.tools],
            "tool_choice": _tool_choice(request),
            "parallel_tool_calls": request.parallel_tool_calls,
            "response_format": _format(request.text.format) if request.text and request.text.format else None,
            "reasoning_effort": request.reasoning.effort if request.reasoning else None,
            "logprobs": logprobs,
            "top_logprobs": request.top_logprobs if logprobs else None,
            "truncate_prompt_tokens": -1 if request.truncation == "auto" else None,
            "priority": request.priority,
            "cache_salt": request.cache_salt,
            "prompt_cache_key": request.prompt_cache_key,
        }
    )


def chat_messages(items: Sequence[AnyItem]) -> ChatMessages:
    """Return items as messages: reasoning, text and calls of an assistant in a row are one, as they were one answer."""
    messages: ChatMessages = []
    turn: dict[str, Any] | None = None
    """The assistant's message while it may still grow: the last of them."""
    for item in items:
        match item:
            case InputMessage(role="assistant"):
                if turn is None or turn["content"] is not None:
                    turn = _begun(messages)
                turn["content"] = _text(item.content)
            case PastReasoning():
                turn = _begun(messages)
                turn["reasoning_content"] = "".join(part.text for part in item.content or item.summary)
            case FunctionCall():
                if turn is None:
                    turn = _begun(messages)
                name = offered_name(item.name, item.namespace)
                turn["tool_calls"].append(_call(item.call_id, name, item.arguments))
            case CustomCall():
                if turn is None:
                    turn = _begun(messages)
                name = offered_name(item.name, item.namespace)
                turn["tool_calls"].append(_custom_call(item.call_id, name, item.input))
            case InputMessage():
                turn = None
                messages.append({"role": item.role, "content": _text(item.content)})
            case CallOutput():
                turn = None
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    for message in messages:
        # Reasoning alone, or a call alone, has no text.
        message["content"] = message["content"] or ""
    return messages


def answer_message(blocks: Sequence[OutputBlock]) -> dict[str, Any]:
    """Return an answer as the message that it is for the next request."""

    def text_of(kind: BlockKind) -> str:
        return "".join(block.text for block in blocks if block.kind is kind)

    return {
        "role": "assistant",
        "content": text_of(BlockKind.TEXT),
        "reasoning_content": text_of(BlockKind.THINKING) or None,
        "tool_calls": [
            (_custom_call if block.is_custom else _call)(block.call_id, block.name, block.text)
            for block in blocks
            if block.kind is BlockKind.CALL
        ],
    }


def listed_items(items: Sequence[AnyItem], id_suffix: str) -> list[dict[str, Any]]:
    """Return the input as GET /v1/responses/{id}/input_items shows it: every item has an id."""
    return [
        {"id": f"{_PREFIXES[item.type]}_{id_suffix}{number:04x}", "status": "completed"}
        | item.model_dump(exclude_none=True, exclude={"content", "output"})
        | _listed_content(item)
        for number, item in enumerate(items)
    ]


_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def _listed_content(item: AnyItem) -> dict[str, Any]:
    match item:
        case CallOutput():
            return {"output": _text(item.output)}
        case PastReasoning():
            return {"content": [{"type": "reasoning_text", "text": part.text} for part in item.content]}
        case InputMessage(role="assistant"):
            return {"content": [{"type": "output_text", "text": part.text, "annotations": []} for part in item.content]}
        case InputMessage():
            return {"content": [{"type": "input_text", "text": part.text} for part in item.content]}
        case FunctionCall() | CustomCall():
            return {}


def _begun(messages: ChatMessages) -> dict[str, Any]:
    messages.append({"role": "assistant", "content": None, "tool_calls": []})
    return messages[-1]


def _text(parts: Sequence[AnyPart]) -> str:
    return "\n".join(part.text for part in parts)


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def _custom_call(call_id: str, name: str, text: str) -> dict[str, Any]:
    return {"type": "custom", "id": call_id, "custom": {"name": name, "input": text}}


def _tool(tool: ResponsesTool) -> dict[str, Any]:
    name, form = offered_name(tool.name, tool.namespace), tool.format
    if tool.type == "function":
        function = {"name": name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
        return {"type": "function", "function": function}
    grammar = None if form is None else {"definition": form.definition, "syntax": form.syntax}
    chat_form = None if form is None else {"type": form.type, "grammar": grammar if form.type == "grammar" else None}
    return {"type": "custom", "custom": {"name": name, "description": tool.description, "format": chat_form}}


def _tool_choice(request: ResponsesRequest) -> str | dict[str, Any]:
    choice = request.tool_choice
    names: dict[str, list[str]] = {}
    """The names that the model knows, by the tools' own."""
    for tool in request.tools:
        known = names.setdefault(tool.name, [])
        # One outside of all namespaces is the first.
        known.insert(0 if tool.namespace is None else len(known), offered_name(tool.name, tool.namespace))
    match choice:
        case ChosenTool():
            return _named(choice, names)
        case AllowedFunctions():
            allowed = {"mode": choice.mode, "tools": [_named(tool, names) for tool in choice.tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case _:
            return choice


def _named(choice: ChosenTool, names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return a choice by the name that the model knows. A tool inside of a namespace is chosen by its own name, or by
    both; one outside goes before those of the same name inside."""
    known = names.get(choice.name, [choice.name])
    if known[0] != choice.name and len(known) > 1:
        raise InvalidRequest(
            f"Several namespaces have a tool {choice.name!r:.100}.",
            hint=f"Choose {known[0]!r:.200}.",
            param="tool_choice",
        )
    return {"type": choice.type, choice.type: {"name": known[0]}}


def _format(asked: TextFormat) -> dict[str, Any]:
    if asked.schema_ is None:
        return {"type": asked.type}
    schema = {"name": asked.name, "schema": asked.schema_, "strict": asked.strict}
    return {"type": asked.type, "json_schema": schema}
