"""How a tool call is written, as data: what a grammar is built from, and what a test writes."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class CallShape(Struct, frozen=True, kw_only=True):
    """The literal texts around the names and arguments of an answer that calls tools:

    opening, then for each call before_name NAME before_arguments ARGUMENTS after_arguments, with separator between
    two calls, then closing. NAME is a tool's name as it is, ARGUMENTS a JSON object that fits the tool's schema.
    """

    opening: str = ""
    before_name: str
    before_arguments: str
    after_arguments: str = ""
    separator: str
    closing: str = ""

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """The text that makes these calls, each a name and its arguments as JSON."""
        written = (
            f"{self.before_name}{name}{self.before_arguments}{arguments}{self.after_arguments}"
            for name, arguments in calls
        )
        return self.opening + self.separator.join(written) + self.closing
