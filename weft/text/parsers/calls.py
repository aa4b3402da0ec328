"""Parses tool calls written as JSON in a model's text: what the styles have in common.

A call starts, for the caller, when its name is known and its arguments have begun; from then on the arguments are
passed on as they come and cannot be taken back. So:

- What turns out to be no call before that point, or ends before it, is content again, unchanged. Only where the
  answer is cut there, it is a call without arguments, or nothing while its name is not known.
- After it, braces are only counted. Arguments that are not JSON are passed on as they are: up to where their braces
  balance, to a marker of the style outside a string, or to the end of the answer. What the model still writes of the
  object around them is dropped, right or wrong.

Arguments are an object, or a string that holds one (it is decoded); null, an empty string, or none at all after a
marker stand for `{}`. White space directly before a call, and at the end of the answer after one, is the call's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from weft.text.parsers.pieces import CallArguments, CallStarted, Content
from weft.text.parsers.streaming import SPACES, TextMachine, Wait

_ARGUMENTS_KEYS = ("arguments", "parameters")
_PLAIN_KEYS = ("type", "id")
"""Other keys that an object without a marker may have and still be a call."""

_IN_STRING = re.compile(r'[^"\\]+')
_OUTSIDE_STRINGS = re.compile(r'[^"{}\[\]<]+')
_SCALAR = re.compile(r'[^\s,"{}\[\]<]+')
_HEX_DIGITS = "0123456789abcdefABCDEF"
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class OpenCall:
    """A call while it is read. It is started once it has an index."""

    def __init__(self, *, is_marked: bool = True) -> None:
        self.is_marked = is_marked
        """A marker of the style stood before it."""
        self.index: int | None = None
        self.name: str | None = None
        self.early_arguments: list[str] | None = None
        """Arguments that came before the name."""


class CallParser(TextMachine):
    """The parser finds calls and gives back the rest as content. A style says where in the text calls stand."""

    markers: tuple[str, ...] = ()
    """The style's markers: each begins with `<` or `[`, and ends any arguments that it stands in, outside a string."""

    def __init__(self, new_id: Callable[[], str], declared: Collection[str] | None = None) -> None:
        """`declared` are the request's tools, where a JSON answer could be taken for a call; None allows any name."""
        super().__init__()
        self._new_id = new_id
        self._declared = declared
        self._num_calls = 0
        self._in_call = False
        """True inside a started call: what is taken is not held back."""
        self._after_call = False
        """True while there was no content since the last call."""

    # Content.

    def _content(self, text: str) -> None:
        body = text.rstrip(SPACES)
        if body:
            self._pieces.append(Content(self._let_go() + body))
            self._after_call = False
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def _give_back(self) -> None:
        """Give the text that was held back as content."""
        if held := self._let_go():
            self._pieces.append(Content(held))
        self._after_call = False

    def _content_until(self, marker: str) -> Wait[bool]:
        """Give content up to the marker, and hold the marker back. Returns False when the answer is over."""
        if (yield from self._until(marker, self._content)):
            self._held.append(marker)
            return True
        if self._after_call:
            self._held.clear()
        self._give_back()
        return False

    # Reading a call: what is taken is held until the call is started.

    def _read(self, count: int = 1) -> str:
        return self._hold(self._take(count))

    def _hold(self, text: str) -> str:
        if not self._in_call:
            self._held.append(text)
        return text

    def _reads(self, char: str) -> Wait[bool]:
        """Take white space and then this character; return whether it is there."""
        yield from self._read_spaces()
        if (yield from self._peek()) != char:
            return False
        self._read()
        return True

    def _read_spaces(self) -> Wait[None]:
        while (yield from self._next_in(SPACES)):
            self._read()

    def _sees_marker(self) -> Wait[bool]:
        for marker in self.markers:
            if (yield from self._sees(marker)):
                return True
        return False

    # One call.

    def _start(self, call: OpenCall, name: str) -> int:
        self._held.clear()
        self._in_call = True
        call.index = self._num_calls
        self._num_calls += 1
        self._pieces.append(CallStarted(call.index, self._new_id(), name))
        return call.index

    def _write(self, call: OpenCall, text: str) -> None:
        """Give more of the arguments."""
        if call.name is not None:
            index = self._start(call, call.name) if call.index is None else call.index
            self._pieces.append(CallArguments(index, text))
        elif call.early_arguments is None:
            call.early_arguments = [text]
        else:
            call.early_arguments.append(text)

    def _end(self, call: OpenCall) -> bool:
        """End the call. Returns False when it was none, and what was held back is content."""
        if call.index is None and self._is_cut and self._is_begun(call):
            if call.name:
                self._start(call, call.name)
            self._held.clear()
        elif call.index is None:
            self._give_back()
            return False
        self._in_call = False
        self._after_call = True
        return call.index is not None

    def _is_begun(self, call: OpenCall) -> bool:
        """Return whether an answer that was cut here was about to make a call."""
        if call.is_marked or call.name or self._after_call:
            return True
        held = "".join("".join(self._held).split())
        return len(held) > 1 and any(f'{{"name":"{name}'.startswith(held) for name in self._declared or ("",))

    def _is_marker(self, beginning: str) -> bool:
        return super()._is_marker(beginning) or (self._after_call and not self._in_call)

    def _object(self, *, marked: bool) -> Wait[bool]:
        """Read `{"name": ..., "arguments": {...}}`, the keys in any order; return whether it is a call.

        Not `marked`: no marker stood before it, so only the keys that belong to a call, and a declared name, make it
        one.
        """
        call = OpenCall(is_marked=marked)
        complete = yield from self._members(call)
        if complete and marked and call.name and call.index is None:
            self._write(call, "{}")
        return self._end(call)

    def _members(self, call: OpenCall) -> Wait[bool]:
        if not (yield from self._reads("{")):
            return False
        while True:
            yield from self._read_spaces()
            key = yield from self._string()
            if key is None or not (yield from self._reads(":")):
                return False
            yield from self._read_spaces()
            if key == "name" and call.name is None:
                call.name = yield from self._string()
                if not call.name or not (call.is_marked or self._declared is None or call.name in self._declared):
                    return False
                if call.early_arguments is not None:
                    self._write(call, "".join(call.early_arguments))
            elif key in _ARGUMENTS_KEYS and call.index is None and call.early_arguments is None:
                if not (yield from self._arguments(call)):
                    return False
            elif call.is_marked or call.index is not None or key in _PLAIN_KEYS:
                yield from self._value(_ignore)
            else:
                return False
            if (yield from self._reads("}")):
                return True
            if not (yield from self._reads(",")):
                return False

    def _arguments(self, call: OpenCall) -> Wait[bool]:
        """Read the value of `arguments`; return whether it can be one."""
        char = yield from self._peek()
        if char == "{":
            yield from self._value(lambda text: self._write(call, text))
            return True
        if char == '"':
            return (yield from self._encoded_arguments(call))
        written: list[str] = []
        yield from self._value(written.append)
        if "".join(written) != "null":
            return False
        self._write(call, "{}")
        return True

    def _encoded_arguments(self, call: OpenCall) -> Wait[bool]:
        """Read arguments in a string, and give them decoded."""
        self._read()
        begun, high = False, ""
        while char := (yield from self._peek()):
            if char == '"':
                self._read()
                if high or not begun:
                    self._write(call, _characters(high) or "{}")
                return True
            text, high = yield from self._string_part(high)
            if not begun:
                text = text.lstrip(SPACES)
                if high or text[:1] not in ("", "{"):
                    return False
            if text:
                begun = True
                self._write(call, text)
        return False

    def _string_part(self, high: str) -> Wait[tuple[str, str]]:
        """Return the next part of a string, decoded, and the first half of a surrogate pair, the second half of which
        comes in an escape of its own. `high`: that of the part before."""
        char = yield from self._peek()
        text = high + ((yield from self._escape()) if char == "\\" else self._hold(self._take_run(_IN_STRING)))
        high = text[-1] if "\ud800" <= text[-1] < "\udc00" else ""
        return _characters(text.removesuffix(high)), high

    def _escape(self) -> Wait[str]:
        """Return what an escape stands for: one character, or half of one. What is no escape stands for itself."""
        escape = self._read()
        if (char := (yield from self._peek())) == "":
            return escape
        escape += self._read()
        if char != "u":
            return _ESCAPES.get(char, escape)
        while len(escape) < 6 and (yield from self._next_in(_HEX_DIGITS)):
            escape += self._read()
        return chr(int(escape[2:], 16)) if len(escape) == 6 else escape

    # JSON as it is written.

    def _string(self) -> Wait[str | None]:
        """Return a string's value; None for what is not one."""
        if (yield from self._peek()) != '"':
            return None
        written: list[str] = []
        yield from self._raw_string(written.append)
        try:
            value: str = json.loads("".join(written))
            value.encode()
        except ValueError:
            return None
        return value

    def _raw_string(self, write: Callable[[str], None]) -> Wait[None]:
        write(self._read())
        while char := (yield from self._peek()):
            if char == "\\":
                write(self._read())
                if (yield from self._peek()):
                    write(self._read())
            elif char == '"':
                write(self._read())
                return
            else:
                write(self._hold(self._take_run(_IN_STRING)))

    def _value(self, write: Callable[[str], None]) -> Wait[None]:
        """Read any value, up to where it ends or cannot go on."""
        depth = 0
        while char := (yield from self._peek()):
            if char in "[<" and (yield from self._sees_marker()):
                return
            if char == '"':
                yield from self._raw_string(write)
            elif char in "{[":
                depth += 1
                write(self._read())
            elif depth == 0:
                # A number or a word: it may come in parts, and is over at the next character of another kind.
                while part := self._take_run(_SCALAR):
                    write(self._hold(part))
                    yield from self._peek()
                return
            elif char in "}]":
                depth -= 1
                write(self._read())
            elif char == "<":
                write(self._read())
            else:
                write(self._hold(self._take_run(_OUTSIDE_STRINGS)))
            if depth == 0:
                return


INPUT = "input"
"""The one parameter of the function that a custom tool is for the model."""


class CustomInput(CallParser):
    """Reads the arguments of one call of a custom tool, and gives their text as content. Where they are not an object
    that begins with that text, they are given as they are."""

    def __init__(self) -> None:
        super().__init__(str)

    def _answer(self) -> Wait[None]:
        is_found = yield from self._finds_text()
        if is_found:
            self._held.clear()
            self._in_call = True
            self._read()
            high = ""
            while (yield from self._peek()) not in ("", '"'):
                text, high = yield from self._string_part(high)
                self._pieces.append(Content(text))
        else:
            self._give_back()
        while (yield from self._peek()):
            rest = self._take(len(self._text) - self._at)
            if not is_found:
                self._pieces.append(Content(rest))

    def _finds_text(self) -> Wait[bool]:
        """Read up to the text's first quote; return whether it is there."""
        if not (yield from self._reads("{")):
            return False
        yield from self._read_spaces()
        if (yield from self._string()) != INPUT or not (yield from self._reads(":")):
            return False
        yield from self._read_spaces()
        return (yield from self._peek()) == '"'


def _ignore(text: str) -> None:
    """Drop a value that is not needed."""


def _characters(utf16: str) -> str:
    """Join surrogate pairs to one character each; half of a pair becomes U+FFFD."""
    if utf16.isascii():
        return utf16
    return utf16.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
