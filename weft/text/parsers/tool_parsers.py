"""The parsers of tool calls, one for each way in which models write them."""

from __future__ import annotations

import re

from weft.text.parsers.calls import CallParser, OpenCall
from weft.text.parsers.streaming import SPACES, Wait

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    """The parser of Hermes and Qwen: any number of `<tool_call>`, a JSON object, `</tool_call>`, with text around."""

    markers = (TOOL_CALL, TOOL_CALL_END)

    def _answer(self) -> Wait[None]:
        while (yield from self._content_until(TOOL_CALL)):
            if (yield from self._object(marked=True)):
                yield from self._close()

    def _close(self) -> Wait[None]:
        """Take the end marker. Models forget it, or write a brace too many before it."""
        while (yield from self._next_in(SPACES + "}]")):
            self._read()
        if (yield from self._sees(TOOL_CALL_END)):
            self._take(len(TOOL_CALL_END))
            self._held.clear()
        elif "".join(self._held).strip(SPACES) and not self._is_cut:
            self._give_back()


PYTHON_TAG = "<|python_tag|>"


class Llama3Parser(CallParser):
    """The parser of Llama 3: a JSON object with `name` and `parameters`, alone or after `<|python_tag|>`; several, with
    `;` between.

    An object without the tag is a call only where the answer begins, or right after another call.
    """

    markers = (PYTHON_TAG,)

    def _answer(self) -> Wait[None]:
        yield from self._calls(marked=False)
        while (yield from self._content_until(PYTHON_TAG)):
            if (yield from self._object(marked=True)):
                yield from self._calls(marked=True)

    def _calls(self, *, marked: bool) -> Wait[None]:
        while True:
            yield from self._read_spaces()
            if self._after_call and (yield from self._reads(";")):
                yield from self._read_spaces()
            if (yield from self._peek()) != "{" or not (yield from self._object(marked=marked)):
                return


CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_NAME = re.compile(r'[^\s\[\]{}<>"]+')


class MistralParser(CallParser):
    """The parser of Mistral: `[TOOL_CALLS]`, then a JSON list of objects; or, since 2025, a name, `[ARGS]` and the
    arguments.

    The ids that a model writes itself are dropped.
    """

    markers = (CALLS,)

    def _answer(self) -> Wait[None]:
        while (yield from self._content_until(CALLS)):
            yield from self._read_spaces()
            if (yield from self._peek()) == "[":
                yield from self._list()
            elif (yield from self._peek()) == "{":
                yield from self._object(marked=True)
            else:
                yield from self._named()

    def _list(self) -> Wait[None]:
        self._read()
        while (yield from self._object(marked=True)):
            if (yield from self._reads("]")):
                self._held.clear()
                return
            if not (yield from self._reads(",")):
                return

    def _named(self) -> Wait[None]:
        """Read `name[ARGS]{...}` or `name{...}`; between them there may be `[CALL_ID]` and an id."""
        call = OpenCall()
        call.name = yield from self._word()
        if not (yield from self._peek()):
            call.name = None  # It may have been cut in two.
        yield from self._read_spaces()
        if (yield from self._sees(CALL_ID)):
            self._read(len(CALL_ID))
            yield from self._word()
        if (yield from self._sees(ARGS)):
            self._read(len(ARGS))
        yield from self._read_spaces()
        if (yield from self._peek()) == "{":
            yield from self._arguments(call)
        self._end(call)

    def _word(self) -> Wait[str]:
        word: list[str] = []
        while (yield from self._peek()) and (part := self._take_run(_NAME)):
            word.append(self._hold(part))
        return "".join(word)
