"""Mistral: `[TOOL_CALLS]`, then a JSON list of objects; or, since 2025, a name, `[ARGS]` and the arguments."""

from __future__ import annotations

import re

from weft.text.parsers.calls import CallParser, OpenCall
from weft.text.parsers.machine import Wait

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_NAME = re.compile(r'[^\s\[\]{}<>"]+')


class MistralParser(CallParser):
    """The ids that a model writes itself are dropped."""

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
        """`name[ARGS]{...}` or `name{...}`; between them there may be `[CALL_ID]` and an id."""
        call = OpenCall()
        call.name = yield from self._word()
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
