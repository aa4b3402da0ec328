"""One request, kept as `Engine.submit` takes it: to be asked again, or of another engine."""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from weft.backends.contract import PLAIN_TERMS, Deltas, Engine, Prompt, Terms
from weft.types import SamplingParams


class Asked(Struct, frozen=True, kw_only=True):
    prompt: Prompt
    params: SamplingParams
    terms: Terms = PLAIN_TERMS
    sibling_of: str = ""
    markers: Collection[str] = ()

    async def submit(self, engine: Engine) -> Deltas:
        return await engine.submit(
            self.prompt, self.params, self.terms, sibling_of=self.sibling_of, markers=self.markers
        )
