"""Tools are described in the prompt for a template that knows none."""

from __future__ import annotations

from typing import Any

from weft.text.chat_template import without_tools
from weft.text.parsers.pieces import collect
from weft.text.parsers.styles import parser_for, tool_style

HERMES = tool_style("hermes", None)
assert HERMES is not None
TOOLS = [{"type": "function", "function": {"name": "wetter", "description": "für eine Stadt", "parameters": {}}}]
USER = {"role": "user", "content": "Oslo?"}
CALLING: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "wetter", "arguments": {"city": "Oslo"}}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "rain"}


def test_the_tools_are_told_by_the_system() -> None:
    system, user = without_tools([USER], TOOLS, HERMES.shape)
    assert system["role"] == "system" and '"für eine Stadt"' in system["content"]
    assert HERMES.shape.before_name in system["content"]
    assert user == USER


def test_a_system_message_is_kept() -> None:
    first, *rest = without_tools([{"role": "system", "content": "Be kind."}, USER], TOOLS, HERMES.shape)
    assert first["content"].startswith("Be kind.") and "wetter" in first["content"]
    assert rest == [USER]


def test_without_tools_nothing_is_added() -> None:
    assert without_tools([USER], None, HERMES.shape) == [USER]


def test_a_past_call_is_written_as_the_model_writes_it() -> None:
    _, calling, result = without_tools([USER, CALLING, RESULT], None, HERMES.shape)
    assert calling.keys() == {"role", "content"} and result["role"] == "user" and "rain" in result["content"]
    parser = parser_for(HERMES, None)
    [call] = collect([*parser.push(calling["content"]), *parser.finish()]).tool_calls
    assert (call.name, call.arguments) == ("wetter", '{"city": "Oslo"}')


def test_words_beside_a_call_stay() -> None:
    [calling] = without_tools([CALLING | {"content": "Let me see."}], None, HERMES.shape)
    assert calling["content"].startswith("Let me see.\n")
