"""A model's chat template renders messages to the text that the model was trained to continue."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.errors import InvalidRequest, ModelError, WeftError, in_full
from weft.text.parsers.pieces import CallShape
from weft.text.template_sandbox import RenderDied, RenderProcess, RenderTimeout, TemplateLimits, to_line
from weft.text.tokenizer import Tokenizer
from weft.types import TextAssets

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})

_COMPLETIONS_HINT = "Send a plain prompt to /v1/completions instead."


class ChatTemplate:
    """A template is compiled once, in a process of its own, and may be rendered from several threads."""

    def __init__(
        self, source: str, *, bos_token: str | None, eos_token: str | None, limits: TemplateLimits | None = None
    ) -> None:
        self.source = source
        self._limits = limits or TemplateLimits()
        self._special_tokens = {
            name: token for name, token in (("bos_token", bos_token), ("eos_token", eos_token)) if token is not None
        }
        self._lock = threading.Lock()
        if len(source) > self._limits.max_source_chars:
            raise ModelError(
                f"The model's chat template has {len(source)} characters; at most {self._limits.max_source_chars}.",
                hint=_COMPLETIONS_HINT,
            )
        self._process: RenderProcess | None = None
        self.declared: frozenset[str] = frozenset(self._started().compiled["declared"])
        """The variables that the template reads; others of a request would have no effect."""

    @property
    def knows_tools(self) -> bool:
        return "tools" in self.declared

    @classmethod
    def from_assets(cls, assets: TextAssets, tokenizer: Tokenizer) -> ChatTemplate:
        """Compile the model's own template. Raises InvalidRequest when it has none."""
        if not assets.chat_template:
            raise InvalidRequest(
                "This model has no chat template, so it does not know what a conversation looks like.",
                hint=_COMPLETIONS_HINT,
            )
        return cls(assets.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """Render the prompt's text. Blocks the caller for as long as the template takes."""
        extra = extra or {}
        self._check_extra(extra)
        variables: dict[str, object] = {
            "documents": None,
            **extra,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
        }
        try:
            line = to_line(variables)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"The messages are not plain JSON: {error}.", param="messages") from error
        with self._lock:
            answer = self._ask(line)
        if "error" in answer:
            raise _render_error(answer["error"], answer["message"], self._limits)
        text: str = answer["text"]
        return _up_to_the_end_of(messages[-1]["content"], text) if continue_final_message else text

    def _check_extra(self, extra: Mapping[str, object]) -> None:
        """Refuse variables that the template does not read: they would be ignored in silence."""
        if reserved := _RESERVED & extra.keys():
            raise InvalidRequest(
                f"Chat template variables cannot set {', '.join(sorted(reserved))}.", param="chat_template_kwargs"
            )
        if unknown := sorted(extra.keys() - self.declared):
            known = ", ".join(sorted(self.declared - _RESERVED)) or "none"
            raise InvalidRequest(
                f"The model's chat template has no variable {unknown[0]!r:.100}; it has: {known}.",
                param="chat_template_kwargs",
            )

    def close(self) -> None:
        """End the render process; a later render starts another."""
        with self._lock:
            if self._process is not None:
                self._process.end()
                self._process = None

    def _ask(self, line: bytes) -> dict[str, Any]:
        process = self._started()
        try:
            return process.ask(line, self._limits.render_seconds)
        except RenderTimeout as error:
            self._process = None
            raise ModelError(
                f"The model's chat template ran longer than {in_full(self._limits.render_seconds)} s and was stopped."
            ) from error
        except RenderDied as error:
            self._process = None
            raise ModelError("The model's chat template crashed its render process.") from error

    def _started(self) -> RenderProcess:
        if self._process is None:
            self._process = _start(self.source, self._limits)
        return self._process


def _up_to_the_end_of(content: str, text: str) -> str:
    """Return the rendered text without what the template writes behind the last message."""
    # Both are read backwards, because `rfind` takes quadratic time and `find` does not.
    backwards = text[::-1]
    # Templates may strip a message's white space.
    for ending in (content, content.strip()):
        if ending and (at := backwards.find(ending[::-1])) >= 0:
            return text[: len(text) - at]
    raise InvalidRequest(
        "The final message cannot be continued: the model's chat template does not write it as it is.",
        param="continue_final_message",
    )


def _start(source: str, limits: TemplateLimits) -> RenderProcess:
    try:
        process = RenderProcess(source, limits)
    except RenderTimeout as error:
        raise ModelError(f"The model's chat template did not compile in {limits.compile_seconds:g} s.") from error
    except RenderDied as error:
        raise ModelError("The model's chat template crashed its render process.") from error
    if "error" in process.compiled:
        process.end()
        raise ModelError(f"The model's chat template cannot be compiled: {process.compiled['message']}.")
    return process


def _render_error(kind: str, message: str, limits: TemplateLimits) -> WeftError:
    match kind:
        case "raised":
            return InvalidRequest(message, param="messages")
        case "length":
            return InvalidRequest(
                f"The rendered conversation has more than {limits.max_output_chars} characters.", param="messages"
            )
        case "memory":
            return ModelError(f"The model's chat template needed more than {limits.memory_bytes >> 20} MiB.")
        case "forbidden":
            return ModelError(
                f"The model's chat template tried something that templates may not do: {message.rstrip('.')}."
            )
        case _:
            return InvalidRequest(
                f"The model's chat template could not render these messages: {message.rstrip('.')}.", param="messages"
            )


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
    """Rewrite a conversation with tools as plain messages of systems, users and assistants."""
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
