"""What chat completions and plain completions have in common: an answer with choices, in one piece or in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from weft.api.handler import DONE, Writer
from weft.api.openai.openai_answers import SYSTEM_FINGERPRINT, UsageBody, usage_body
from weft.api.openai.openai_schema import SamplingFields
from weft.api.translate import ParsedRequest
from weft.backends.contract import Engine
from weft.types import Usage


class ChoicesWriter(Writer):
    """Writes one answer, with all its choices. Those of a chunk stand between bytes that are encoded once."""

    def __init__(
        self, answer_id: str, chunk_object: str, request: SamplingFields, parsed: ParsedRequest, engine: Engine
    ) -> None:
        """`chunk_object`: what a chunk calls itself."""
        super().__init__(answer_id, request.model, stream=request.stream)
        self._parsed = parsed
        self._engine = engine
        options = request.stream_options
        self._include_usage = options is not None and options.include_usage
        self._continuous_usage = options is not None and options.continuous_usage_stats
        self._created = int(time.time())
        head = {
            "id": answer_id,
            "object": chunk_object,
            "created": self._created,
            "model": request.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }
        self._before = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"
        self._usages = [Usage() for _ in parsed.requests]

    def closing(self, usages: Sequence[Usage]) -> bytes:
        if not self._include_usage:
            return DONE
        return self._before + self._after_with({"usage": self._usage_body(usages)}) + DONE

    def _after_with(self, fields: dict[str, object]) -> bytes:
        """Return what ends a chunk that has these fields besides its choices."""
        return b"]," + msgspec.json.encode(fields)[1:] + b"\n\n" if fields else self._after

    def _usage_body(self, usages: Sequence[Usage]) -> UsageBody:
        return usage_body(usages, self._parsed.n, self._parsed.truncated_tokens)
