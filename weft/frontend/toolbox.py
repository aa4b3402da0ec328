"""Which tools an answer may call, which it must, and how this model writes calls."""

from __future__ import annotations

from msgspec import Struct

from weft.backends.contract import ChatStyles
from weft.errors import InvalidRequest
from weft.frontend.schemas import ChatRequest, NamedTool, Tool
from weft.text.parsers.styles import ToolStyle


class Toolbox(Struct, frozen=True):
    offered: list[Tool] = []
    """The tools that the model is told of."""
    style: ToolStyle | None = None
    """None: no calls are looked for."""
    named: Tool | None = None
    """The one that must be called."""
    must_call: bool = False
    """One of them must be called."""


def toolbox(request: ChatRequest, styles: ChatStyles, *, is_read: bool = False) -> Toolbox:
    """`is_read`: the engine finds the calls itself, and no style is needed."""
    choice = request.tool_choice
    names = [tool.function.name for tool in request.tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("Two tools have the same name.", param="tools")
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice asks for a call, and there are no tools.", param="tool_choice")
        return Toolbox()
    if choice == "none":
        return Toolbox()
    if styles.tools is None and not is_read:
        raise InvalidRequest(
            "It is not known how this model writes tool calls.",
            hint="The operator can say it with --tool-style.",
            param="tools",
        )
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise InvalidRequest(f"There is no tool {choice.function.name!r:.100}.", param="tool_choice")
        named = request.tools[names.index(choice.function.name)]
        return Toolbox(request.tools, styles.tools, named, True)
    return Toolbox(request.tools, styles.tools, None, choice == "required")
