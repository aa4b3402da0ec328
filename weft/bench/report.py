"""The parts that all reports share: the environment, and bounds on figures."""

from __future__ import annotations

import os
import platform
from typing import Any

from msgspec import Struct

from weft import __version__


def environment() -> dict[str, Any]:
    return {
        "weft": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


class Required(Struct, frozen=True, kw_only=True):
    """The bounds that figures must keep; None for no bound."""

    first_token_ms: float | None = None
    """The upper bound of the time to the first token."""
    tokens_per_s: float | None = None
    """The lower bound of the tokens a second."""

    def first_token(self, name: str, milliseconds: float) -> list[Judged]:
        bound = self.first_token_ms
        if bound is None:
            return []
        return [Judged(name=name, measured=milliseconds, bound=f"< {bound:g} ms", kept=milliseconds < bound)]

    def speed(self, name: str, tokens_per_s: float) -> list[Judged]:
        bound = self.tokens_per_s
        if bound is None:
            return []
        return [Judged(name=name, measured=tokens_per_s, bound=f"≥ {bound:g} tok/s", kept=tokens_per_s >= bound)]


class Judged(Struct, frozen=True, kw_only=True):
    """One figure, its bound, and whether the bound was kept."""

    name: str
    measured: float
    bound: str
    kept: bool
