"""Llama 3: a JSON object with `name` and `parameters`, alone or after `<|python_tag|>`; several, with `;` between."""

from __future__ import annotations

from weft.text.parsers.calls import CallParser
from weft.text.parsers.machine import Wait

PYTHON_TAG = "<|python_tag|>"


class Llama3Parser(CallParser):
    """An object without the tag is a call only where the answer begins, or right after another call."""

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
