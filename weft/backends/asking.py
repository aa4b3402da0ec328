"""One request, kept as `Engine.submit` takes it: to be asked again, or of another engine."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, TypeGuard

from msgspec import Struct

from weft.backends.contract import Deltas, Engine, Prompt, not_taken
from weft.types import SamplingParams


class AdaptingEngine(Engine, Protocol):
    """An engine whose requests may name a LoRA adapter."""

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        priority: int = 0,
        tenant: str = "",
        sibling_of: str = "",
        markers: Collection[str] = (),
        adapter: str = "",
    ) -> Deltas: ...


def takes_adapters(engine: Engine) -> TypeGuard[AdaptingEngine]:
    return engine.abilities.lora


class Asked(Struct, frozen=True, kw_only=True):
    prompt: Prompt
    params: SamplingParams
    request_id: str | None = None
    cache_salt: str = ""
    priority: int = 0
    tenant: str = ""
    sibling_of: str = ""
    markers: Collection[str] = ()
    adapter: str = ""
    """Empty: the model as it is."""

    async def submit(self, engine: Engine) -> Deltas:
        if not self.adapter:
            return await engine.submit(
                self.prompt,
                self.params,
                request_id=self.request_id,
                cache_salt=self.cache_salt,
                priority=self.priority,
                tenant=self.tenant,
                sibling_of=self.sibling_of,
                markers=self.markers,
            )
        if not takes_adapters(engine):
            raise not_taken(engine.name, "adapter")
        return await engine.submit(
            self.prompt,
            self.params,
            request_id=self.request_id,
            cache_salt=self.cache_salt,
            priority=self.priority,
            tenant=self.tenant,
            sibling_of=self.sibling_of,
            markers=self.markers,
            adapter=self.adapter,
        )
