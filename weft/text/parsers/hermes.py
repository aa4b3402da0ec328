"""Hermes and Qwen: `<tool_call>`, a JSON object, `</tool_call>`; any number of them, with text around."""

from __future__ import annotations

from weft.text.parsers.calls import CallParser
from weft.text.parsers.machine import SPACES, Wait

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    markers = (BEGIN, END)

    def _answer(self) -> Wait[None]:
        while (yield from self._content_until(BEGIN)):
            if (yield from self._object(marked=True)):
                yield from self._close()

    def _close(self) -> Wait[None]:
        """The end marker. Models forget it, or write a brace too many before it."""
        while (yield from self._next_in(SPACES + "}]")):
            self._read()
        if (yield from self._sees(END)):
            self._take(len(END))
            self._held.clear()
        elif "".join(self._held).strip(SPACES):
            self._give_back()
