"""The contract for callers that wait: a model is loaded, answers come as text, and all of it from any thread.

`HostedEngine` keeps it for every engine that Weft has. Another package may keep it in its own way: of all that is
below, only four methods have to be written.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any

from msgspec import Struct

from weft.types import FinishReason


class InferMetrics(Struct, frozen=True, kw_only=True):
    """The figures of one request, once it has ended."""

    request_id: str
    finish: FinishReason
    prompt_tokens: int = 0
    completion_tokens: int = 0
    queue_seconds: float | None = None
    """Seconds before the engine began with it; None: unknown."""
    ttft_seconds: float = 0.0
    """Seconds until its first text came; 0: none did."""
    generation_seconds: float = 0.0
    """Seconds until its last text came."""

    @property
    def tokens_per_second(self) -> float:
        return self.completion_tokens / self.generation_seconds if self.generation_seconds else 0.0


class BaseEngine(ABC):
    _chunk_size = 0
    last_metrics: InferMetrics | None = None
    """The metrics of the request that ended last, with the `request_id` of `infer`: the endpoints show what is left
    here. `HostedEngine.infer(..., on_metrics=f)` calls f with those of that request."""

    @property
    def stream_chunk_size(self) -> int:
        """Tokens in a piece of an answer, after the first token, which comes alone; 0, until it is set: as they are
        made. May be set at any time; below 1 it is 1 then. The pieces joined are the text, always."""
        return self._chunk_size

    @stream_chunk_size.setter
    def stream_chunk_size(self, tokens: int) -> None:
        self._chunk_size = max(1, tokens)

    @abstractmethod
    def load_model(self, model_path: str, adapter_path: str | None = None, **kwargs: Any) -> None:
        """Load a model, to be ready to answer. A model that was loaded before is unloaded first."""

    @abstractmethod
    def infer(self, prompt: str, **kwargs: Any) -> Generator[str, None, None]:
        """Continue the prompt: text as it comes. Leaving the generator early ends the request."""

    @abstractmethod
    def unload_model(self) -> None:
        """Give back all memory that the model has. Harmless when none is loaded."""

    @abstractmethod
    def get_memory_usage(self) -> dict[str, float]:
        """Return allocated_gb, reserved_gb, total_gb (GiB), and utilization: the allocated share of the total."""

    def get_model_info(self) -> dict[str, Any]:
        """Return `is_loaded`, `engine`, and what is known of the model."""
        return {"is_loaded": False, "engine": type(self).__name__}

    def health_check(self) -> bool:
        """Return whether a request would be answered now."""
        return bool(self.get_model_info()["is_loaded"])

    @property
    def is_async(self) -> bool:
        """True when requests from many threads or tasks are computed together."""
        return False

    async def async_infer(self, prompt: str, **kwargs: Any) -> AsyncGenerator[str, None]:
        """Do what `infer` does for a caller on an event loop, which goes on meanwhile."""
        chunks, in_use = self.infer(prompt, **kwargs), threading.Lock()

        def step() -> str | None:
            with in_use:
                return next(chunks, None)

        def end() -> None:
            with in_use:
                chunks.close()

        try:
            while (chunk := await asyncio.to_thread(step)) is not None:
                yield chunk
        finally:
            # A reader that is cancelled leaves a step behind, which ends before the generator can be closed.
            await asyncio.shield(asyncio.to_thread(end))

    def infer_batch(self, prompts: Sequence[str], **kwargs: Any) -> list[str]:
        """Return whole answers, in the order of the prompts."""
        return ["".join(self.infer(prompt, **kwargs)) for prompt in prompts]

    def abort(self, request_id: str) -> bool:
        """End a request by the id that `infer` was given; its generator ends. False: none of that id is open."""
        return False
