"""vLLM behind the contract. Beyond the wire there is vLLM instead of Weft's own loop; on this side all is as with the
native engine: the client that supervises, the journal that resumes, the text made of tokens.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from weft.backends.abilities import cannot, check_abilities
from weft.backends.contract import Abilities, Embedding, Prompt, tokens_of
from weft.backends.native import NativeDeltas, NativeEngine
from weft.backends.text_room import TextRoom
from weft.backends.vllm.adapters import Adapters
from weft.backends.vllm.kinds import Kind
from weft.engine.client import EngineClient
from weft.errors import InvalidRequest
from weft.text.output import OutputText
from weft.types import Pooling, Request, SamplingParams

ABILITIES = Abilities(embeddings=False, images=False)
"""Forms where the tokenizer is known, and LoRA where vLLM was started with room for adapters."""


class VllmEngine(NativeEngine):
    def __init__(
        self, kind: Kind, client: EngineClient, room: TextRoom, adapters: Adapters | None, *, has_grammars: bool
    ) -> None:
        """`adapters` is None where vLLM was started without room for any."""
        super().__init__(client, room)
        self.name = kind.name
        self.adapters = adapters
        self.abilities = replace(ABILITIES, grammar=has_grammars, lora=adapters is not None)

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
    ) -> NativeDeltas:
        """`adapter`: the name of one of `adapters`; empty: the model as it is."""
        check_abilities(self, params, priority=priority, cache_salt=cache_salt)
        request = self._room.request_of(
            self.model,
            tokens_of(prompt),
            params,
            request_id=request_id,
            cache_salt=cache_salt,
            priority=priority,
            tenant=tenant,
            sibling_of=sibling_of,
        )
        adapted = self._adapted(request, params.seed, adapter)
        return NativeDeltas(self.client, adapted, OutputText(self.tokenizer, adapted, markers))

    async def embed(
        self,
        prompt: Prompt,
        pooling: Pooling,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        priority: int = 0,
        tenant: str = "",
    ) -> Embedding:
        raise cannot(self.name, "embed")

    def _adapted(self, request: Request, seed: int | None, adapter: str) -> Request:
        """A seed that nobody asked for is left to vLLM: it samples requests with seeds one by one."""
        if adapter and self.adapters is None:
            raise InvalidRequest(f"{self.name} was started without adapters.", param="adapter")
        chosen = self.adapters.named(adapter) if adapter and self.adapters is not None else None
        return replace(request, params=replace(request.params, seed=seed), adapter=chosen)
