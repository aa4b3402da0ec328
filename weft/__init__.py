"""Weft: one serving engine for generative models."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from weft.llm import LLM
    from weft.types import SamplingParams


def __getattr__(name: str) -> object:
    """Public names are imported when they are asked for: `import weft` itself costs nothing."""
    if name == "LLM":
        from weft.llm import LLM

        return LLM
    if name == "SamplingParams":
        from weft.types import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'weft' has no attribute {name!r}")
