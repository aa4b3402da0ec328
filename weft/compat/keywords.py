"""The keywords of `load_model` and `infer`: Weft's names, and those of the CY-LLM Engine where they differ. An unknown
keyword is refused with the nearest that is known."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from weft.backends.contract import Abilities
from weft.config import nearest
from weft.errors import ConfigError, InvalidRequest
from weft.models_file import FOUR_BIT, MEANINGLESS
from weft.options import LoadMode, settings
from weft.types import SamplingParams

log = logging.getLogger(__name__)

SAMPLING_DEFAULTS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "max_tokens": 512,
    "repetition_penalty": 1.1,
}
"""Values for a request that does not give them, the same for every engine: fewer tokens, where the context has less
capacity; no penalty, where the engine knows none."""

SAMPLING_ALIASES = {"max_new_tokens": "max_tokens"}


class GenerationKeywords(Struct, frozen=True, kw_only=True):
    """The keywords of `infer`: how one prompt is to be answered."""

    params: SamplingParams
    request_id: str
    priority: int = 0
    cache_salt: str = ""
    lora_name: str | None = None
    """None: the adapter that the model was loaded with, if any; empty: none."""
    on_metrics: Any = None
    """A function that is called with the InferMetrics of the answer."""


OWN_NAMES = tuple(name for name in GenerationKeywords.__struct_fields__ if name != "params")


def generation_keywords(given: Mapping[str, Any], abilities: Abilities, capacity: int | None) -> GenerationKeywords:
    """Read the keywords of `infer`; `capacity` is what the context has left for the answer, where that is known."""
    sampling = defaults_for(abilities, capacity)
    own: dict[str, Any] = {"request_id": uuid.uuid4().hex}
    for keyword, value in given.items():
        name = SAMPLING_ALIASES.get(keyword, keyword)
        if name in OWN_NAMES:
            own[name] = value
        elif name in SamplingParams.__struct_fields__:
            sampling[name] = value
        else:
            known = (*SamplingParams.__struct_fields__, *SAMPLING_ALIASES, *OWN_NAMES)
            raise InvalidRequest(f"There is no parameter {keyword!r}.", hint=nearest(keyword, known), param=keyword)
    stop = sampling.get("stop")
    sampling["stop"] = (stop,) if isinstance(stop, str) else stop or ()
    try:
        keywords = msgspec.convert({"params": sampling, **own}, GenerationKeywords)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{error}.") from error
    keywords.params.check()
    return keywords


def defaults_for(abilities: Abilities, capacity: int | None) -> dict[str, Any]:
    defaults = dict(SAMPLING_DEFAULTS)
    if not abilities.repetition_penalty:
        del defaults["repetition_penalty"]
    if capacity is not None:
        defaults["max_tokens"] = max(1, min(defaults["max_tokens"], capacity))
    return defaults


TAKEN_FOR_GRANTED: dict[str, object] = {"interactive": False}
"""Keywords that are accepted at one value alone: that of what happens anyway."""


class LoadKeywords(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keywords of `load_model` besides the settings of Weft: how a model is to be loaded."""

    load_mode: LoadMode = "check_and_load"
    """check_only: find, fetch and check the model, and load nothing; async_load: return at once."""
    skip_vram_check: bool = False
    """Start the engine as it was asked for, without a plan of its memory and without trying less."""
    adapters: dict[str, str] = {}
    """LoRA directories by the names that requests give: --adapter, for a program."""
    use_4bit: bool = False
    """The same as quantization="bitsandbytes"."""


def load_keywords(given: Mapping[str, Any]) -> tuple[LoadKeywords, dict[str, Any]]:
    """Read the keywords of `load_model`: how to load, and settings of Weft. None stands for a default. Keywords that
    mean nothing in a registry file mean nothing here."""
    known = [setting.name for setting in settings()]
    if meaningless := [keyword for keyword in given if keyword in MEANINGLESS]:
        log.warning("words that mean nothing here are passed over: %s", ", ".join(meaningless))
    own: dict[str, Any] = {}
    chosen: dict[str, Any] = {}
    for keyword, value in given.items():
        if keyword in MEANINGLESS:
            continue
        if keyword in TAKEN_FOR_GRANTED:
            if value not in (None, TAKEN_FOR_GRANTED[keyword]):
                raise ConfigError(f"{keyword} can be {TAKEN_FOR_GRANTED[keyword]!r} alone, and not {value!r}.")
        elif keyword in LoadKeywords.__struct_fields__:
            own |= {keyword: value} if value is not None else {}
        elif keyword in known:
            chosen |= {keyword: value} if value is not None else {}
        else:
            hint = nearest(keyword, (*known, *LoadKeywords.__struct_fields__, *TAKEN_FOR_GRANTED))
            raise ConfigError(f"There is no setting {keyword!r}.", hint=hint)
    try:
        keywords = msgspec.convert(own, LoadKeywords)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}.") from error
    if keywords.use_4bit and chosen.setdefault("quantization", FOUR_BIT) != FOUR_BIT:
        raise ConfigError(f"use_4bit means {FOUR_BIT}, and quantization is {chosen['quantization']!r}.")
    return keywords, chosen
