"""Tools for a model whose chat template knows none: told in words, called and answered in plain text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.text.parsers.shape import CallShape

_INTRODUCTION = """You can call functions. These are their signatures, one in each line:
<tools>
{tools}
</tools>
To call a function, answer with its name and its arguments, exactly like this:
{example}"""

Message = Mapping[str, Any]


def without_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, shape: CallShape
) -> list[Message]:
    """The same conversation in plain messages of systems, users and assistants."""
    plain = [_plain(message, shape) for message in messages]
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(
        tools=listed, example=shape.write([("the function's name", '{"an argument": "its value"}')])
    )
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{introduction}"}, *plain[1:]]
    return [{"role": "system", "content": introduction}, *plain]


def _plain(message: Message, shape: CallShape) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        written = shape.write(list(_calls(calls)))
        content = f"{message['content']}\n{written}" if message["content"] else written
        return {"role": message["role"], "content": content}
    return message


def _calls(calls: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for call in calls:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield call["function"]["name"], text
