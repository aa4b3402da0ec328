"""An engine that another package wrote as a class of BaseEngine, behind the contract that the doors know.

Its tokens are not known here: prompts are text, and so are answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from weft.backends.abilities import cannot, check_abilities
from weft.backends.base import BaseEngine
from weft.backends.contract import (
    PLAIN_TERMS,
    Abilities,
    ChatPrompt,
    ChatStyles,
    Deltas,
    Embedding,
    Health,
    ImageUpdates,
    Prompt,
    Terms,
    not_taken,
    tokens_unknown,
)
from weft.config import Config
from weft.errors import InvalidRequest
from weft.payloads import AdditionalInformation, PromptEmbeds
from weft.text.tokenizer import Tokenizer
from weft.types import Adapter, Delta, EngineStats, FinishReason, ImageParams, ModelInfo, Pooling, SamplingParams

log = logging.getLogger(__name__)

WORDS = ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "stop", "seed")
"""What `infer` is told, of a request's parameters: those that are not at their default."""

ABILITIES = Abilities(**{name: name in WORDS for name in Abilities.__struct_fields__})
PLAIN = SamplingParams()


async def start_adapted(engine_class: type[BaseEngine], config: Config) -> AdaptedEngine:
    """Make one, and load the model that the configuration names."""
    inner = engine_class()
    await asyncio.to_thread(inner.load_model, config.model.model)
    return AdaptedEngine(inner, config)


class AdaptedDeltas(Deltas):
    def __init__(self, engine: AdaptedEngine, prompt: str, words: Mapping[str, Any]) -> None:
        self._engine = engine
        self._chunks = engine.inner.async_infer(prompt, **words)
        self._ended = False
        engine.open.add(self)

    def __aiter__(self) -> AdaptedDeltas:
        return self

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        try:
            return Delta(text=await anext(self._chunks))
        except StopAsyncIteration:
            self._end()
            return Delta(finish=FinishReason.STOP)
        except asyncio.CancelledError:
            self._end()
            raise
        except Exception as error:
            self._end()
            log.exception("the engine %s failed", self._engine.name)
            return Delta(finish=FinishReason.ERROR, error=f"{type(error).__name__}: {error}")

    async def aclose(self) -> None:
        self._end()
        await self._chunks.aclose()

    def _end(self) -> None:
        self._ended = True
        self._engine.open.discard(self)


class AdaptedEngine:
    abilities = ABILITIES
    styles = ChatStyles()
    adapters: Collection[Adapter] = ()

    def __init__(self, inner: BaseEngine, config: Config) -> None:
        self.name = config.backend.engine
        self.inner = inner
        self.open: set[AdaptedDeltas] = set()
        info = inner.get_model_info()
        self.model = ModelInfo(
            name=str(info.get("name", config.model.model)),
            max_model_len=int(info.get("max_model_len", 0)),
            logits_width=0,
            num_blocks=0,
            block_size=0,
            device=str(info.get("device", "")),
            dtype=str(info.get("dtype", "")),
        )

    @property
    def tokenizer(self) -> Tokenizer:
        raise tokens_unknown(self.name, "This")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        raise tokens_unknown(self.name, "This")

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        terms: Terms = PLAIN_TERMS,
        *,
        sibling_of: str = "",
        markers: Collection[str] = (),
    ) -> AdaptedDeltas:
        params.check()
        check_abilities(self, params, terms)
        if not isinstance(prompt, str):
            raise InvalidRequest(
                f"The engine {self.name} takes text, and neither conversations nor token ids.",
                hint="Send a plain prompt to /v1/completions instead.",
            )
        if not prompt:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        given = {word: getattr(params, word) for word in WORDS}
        return AdaptedDeltas(self, prompt, {word: v for word, v in given.items() if v != getattr(PLAIN, word)})

    async def embed(self, prompt: Prompt, pooling: Pooling, terms: Terms = PLAIN_TERMS) -> Embedding:
        raise cannot(self.name, "embed")

    async def draw(
        self,
        prompt_token_ids: list[int],
        image: ImageParams,
        terms: Terms = PLAIN_TERMS,
        *,
        prompt_embeds: PromptEmbeds | None = None,
        additional_information: AdditionalInformation | None = None,
    ) -> ImageUpdates:
        raise cannot(self.name, "draw images")

    async def load_adapter(self, name: str, path: str) -> None:
        raise not_taken(self.name, "adapter")

    async def unload_adapter(self, name: str) -> None:
        raise not_taken(self.name, "adapter")

    def health(self) -> Health:
        return Health(True) if self.inner.health_check() else Health(False, "failed")

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.open))

    def restarts(self) -> int:
        return 0

    def open_requests(self) -> int:
        return len(self.open)

    async def reset_cache(self) -> int:
        raise cannot(self.name, "forget prompts")

    async def start_profile(self, folder: str) -> str:
        raise cannot(self.name, "be profiled")

    async def stop_profile(self) -> str:
        raise cannot(self.name, "be profiled")

    async def close(self) -> None:
        await asyncio.to_thread(self.inner.unload_model)
