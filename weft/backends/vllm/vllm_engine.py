"""vLLM behind the contract. Beyond the wire there is vLLM instead of Weft's own loop; on this side all is as with the
native engine: the client that supervises, the journal that resumes, the text made of tokens.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from msgspec.structs import replace

from weft.backends.adapters import Adapters
from weft.backends.contract import PLAIN_TERMS, Abilities, Embedding, Prompt, Terms, cannot
from weft.backends.model_text import ModelText
from weft.backends.native import NativeEngine, NativeImageUpdates, open_engine
from weft.backends.vllm.arguments import KINDS, VllmKind, refuse
from weft.backends.vllm.vllm_process import VllmProcess
from weft.checkpoint.model_files import ModelFiles
from weft.engine.client import EngineClient
from weft.errors import InvalidRequest
from weft.hub.resolve import find_model
from weft.machine.memory import safe_share
from weft.options import Config
from weft.payloads import NO_TEXTS, GivenTexts
from weft.types import ImageParams, Pooling, Request, SamplingParams

ABILITIES = Abilities(embeddings=False, images=False)
"""Forms where the tokenizer is known, and LoRA where vLLM was started with room for adapters."""


class VllmEngine(NativeEngine):
    def __init__(
        self,
        kind: VllmKind,
        client: EngineClient,
        room: ModelText,
        adapters: Adapters,
        *,
        takes_adapters: bool,
        has_grammars: bool,
    ) -> None:
        """`takes_adapters`: vLLM was started with room for them."""
        super().__init__(client, room, adapters)
        self.name = kind.name
        self.abilities = replace(ABILITIES, grammar=has_grammars, lora=takes_adapters)

    def _request(self, prompt: Prompt, params: SamplingParams, terms: Terms, sibling_of: str = "") -> Request:
        """A seed that nobody asked for is left to vLLM: it samples requests with seeds one by one."""
        request = super()._request(prompt, params, terms, sibling_of)
        return replace(request, params=replace(request.params, seed=params.seed))

    async def _teach_words(self) -> None:
        """vLLM reads the tokenizer itself."""

    async def embed(self, prompt: Prompt, pooling: Pooling, terms: Terms = PLAIN_TERMS) -> Embedding:
        raise cannot(self.name, "embed")

    async def draw(
        self, prompt_token_ids: list[int], image: ImageParams, terms: Terms = PLAIN_TERMS, given: GivenTexts = NO_TEXTS
    ) -> NativeImageUpdates:
        raise cannot(self.name, "draw images")

    async def load_adapter(self, name: str, path: str) -> None:
        if not self.abilities.lora:
            raise InvalidRequest(
                f"{self.name} was started without room for adapters.", hint="Start it with --adapter or --enable-lora."
            )
        await super().load_adapter(name, path)


log = logging.getLogger(__name__)


async def start(config: Config) -> VllmEngine:
    """The one of vLLM's engines that the configuration names."""
    return await start_kind(config, KINDS[config.backend.engine])


def refuse_load(config: Config, files: ModelFiles) -> None:
    """Raise what starting it would refuse."""
    refuse(config, files, KINDS[config.backend.engine])


async def start_kind(config: Config, kind: VllmKind) -> VllmEngine:
    files = await asyncio.to_thread(find_model, config)
    refuse(config, files, kind)
    if safe_share(config.cache) != config.cache.gpu_memory_utilization:
        log.warning("--gpu-memory-utilization is lowered to %g.", safe_share(config.cache))
    make = partial(
        VllmEngine, kind, takes_adapters=config.model.wants_adapters, has_grammars=files.kind == "huggingface"
    )
    return await open_engine(EngineClient(config, files, partial(VllmProcess, kind)), make)
