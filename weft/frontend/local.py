"""What a door that waits, a terminal, needs of an engine: its answers as an iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from weft.backends.contract import Engine, Prompt
from weft.types import Delta, SamplingParams


class LocalEngine(Protocol):
    @property
    def engine(self) -> Engine: ...

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[Delta]:
        """The answer as it comes; raises the error that it ends with. Leaving the iterator early aborts."""
