"""vLLM behind the contract. Beyond the wire there is vLLM instead of Weft's own loop; on this side all is as with the
native engine: the client that supervises, the journal that resumes, the text made of tokens.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import structs

from weft.backends.abilities import cannot, check_abilities
from weft.backends.adapters import Adapters
from weft.backends.contract import PLAIN_TERMS, Abilities, Embedding, Prompt, Terms, tokens_of
from weft.backends.native import NativeDeltas, NativeEngine
from weft.backends.text_room import TextRoom
from weft.backends.vllm.kinds import Kind
from weft.engine.client import EngineClient
from weft.errors import InvalidRequest
from weft.text.output import OutputText
from weft.types import Pooling, SamplingParams


class VllmEngine(NativeEngine):
    def __init__(
        self,
        kind: Kind,
        client: EngineClient,
        room: TextRoom,
        adapters: Adapters,
        *,
        takes_adapters: bool,
        has_grammars: bool,
    ) -> None:
        """`takes_adapters`: vLLM was started with room for them."""
        super().__init__(client, room, adapters)
        self.name = kind.name
        self.abilities = Abilities(embeddings=False, images=False, grammar=has_grammars, lora=takes_adapters)

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        terms: Terms = PLAIN_TERMS,
        *,
        sibling_of: str = "",
        markers: Collection[str] = (),
    ) -> NativeDeltas:
        check_abilities(self, params, terms)
        request = self._room.request_of(
            self.model,
            tokens_of(prompt),
            params,
            terms,
            sibling_of=sibling_of,
            adapter=self._adapters.chosen(terms.adapter),
        )
        # A seed that nobody asked for is left to vLLM: it samples requests with seeds one by one.
        request = structs.replace(request, params=structs.replace(request.params, seed=params.seed))
        return NativeDeltas(self.client, request, OutputText(self.tokenizer, request, markers))

    async def embed(self, prompt: Prompt, pooling: Pooling, terms: Terms = PLAIN_TERMS) -> Embedding:
        raise cannot(self.name, "embed")

    async def load_adapter(self, name: str, path: str) -> None:
        if not self.abilities.lora:
            raise InvalidRequest(
                f"{self.name} was started without room for adapters.", hint="Start it with --adapter or --enable-lora."
            )
        await super().load_adapter(name, path)
