"""What a caller says by keyword, to load a model or to ask for an answer: Weft's names, and those of the CY-LLM Engine
where they differ. A word that nobody knows is refused with the nearest that is known."""

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
from weft.models_file import FOUR_BIT, MEANINGLESS, ONE_VALUE
from weft.options import LoadMode, settings
from weft.types import SamplingParams

log = logging.getLogger(__name__)

SAMPLING_DEFAULTS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "max_tokens": 512,
    "repetition_penalty": 1.1,
}
"""For a request that does not say, the same for every engine. Fewer tokens, where the context has no room for so many;
no penalty, where the engine knows none."""

SAMPLING_ALIASES = {"max_new_tokens": "max_tokens"}


class GenerationKeywords(Struct, frozen=True, kw_only=True):
    """How one prompt is to be answered."""

    params: SamplingParams
    request_id: str
    priority: int = 0
    cache_salt: str = ""
    lora_name: str | None = None
    """None: the adapter that the model was loaded with, if any; empty: none."""
    on_metrics: Any = None
    """A function of InferMetrics."""


OWN_WORDS = tuple(name for name in GenerationKeywords.__struct_fields__ if name != "params")


def generation_keywords(words: Mapping[str, Any], abilities: Abilities, room: int | None) -> GenerationKeywords:
    """The words of `infer`; `room` is what the context has left for the answer, where that is known."""
    sampling = defaults_for(abilities, room)
    own: dict[str, Any] = {"request_id": uuid.uuid4().hex}
    for word, value in words.items():
        name = SAMPLING_ALIASES.get(word, word)
        if name in OWN_WORDS:
            own[name] = value
        elif name in SamplingParams.__struct_fields__:
            sampling[name] = value
        else:
            known = (*SamplingParams.__struct_fields__, *SAMPLING_ALIASES, *OWN_WORDS)
            raise InvalidRequest(f"There is no parameter {word!r}.", hint=nearest(word, known), param=word)
    stop = sampling.get("stop")
    sampling["stop"] = (stop,) if isinstance(stop, str) else stop or ()
    try:
        wishes = msgspec.convert({"params": sampling, **own}, GenerationKeywords)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{error}.") from error
    wishes.params.check()
    return wishes


def defaults_for(abilities: Abilities, room: int | None) -> dict[str, Any]:
    defaults = dict(SAMPLING_DEFAULTS)
    if not abilities.repetition_penalty:
        del defaults["repetition_penalty"]
    if room is not None:
        defaults["max_tokens"] = max(1, min(defaults["max_tokens"], room))
    return defaults


TAKEN_FOR_GRANTED: dict[str, object] = ONE_VALUE | {"interactive": False}
"""Words that have a meaning at one value alone: that of what happens anyway."""


class LoadKeywords(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is to be loaded, besides the settings of Weft."""

    load_mode: LoadMode = "check_and_load"
    """check_only: find, fetch and check the model, and load nothing; async_load: return at once."""
    skip_vram_check: bool = False
    """Start the engine as it was asked for, without a plan of its memory and without trying less."""
    adapters: dict[str, str] = {}
    """LoRA directories by the names that requests give: --adapter, for a program."""
    use_4bit: bool = False
    """The same as quantization="bitsandbytes"."""


def load_keywords(words: Mapping[str, Any]) -> tuple[LoadKeywords, dict[str, Any]]:
    """The words of `load_model`: how to load, and settings of Weft. None stands for a default. Words that mean nothing
    in a registry file mean nothing here."""
    known = [setting.name for setting in settings()]
    if meaningless := [word for word in words if word in MEANINGLESS]:
        log.warning("words that mean nothing here are passed over: %s", ", ".join(meaningless))
    wishes: dict[str, Any] = {}
    chosen: dict[str, Any] = {}
    for word, value in words.items():
        if word in MEANINGLESS:
            continue
        if word in TAKEN_FOR_GRANTED:
            if value not in (None, TAKEN_FOR_GRANTED[word]):
                raise ConfigError(f"{word} can be {TAKEN_FOR_GRANTED[word]!r} alone, and not {value!r}.")
        elif word in LoadKeywords.__struct_fields__:
            wishes |= {word: value} if value is not None else {}
        elif word in known:
            chosen |= {word: value} if value is not None else {}
        else:
            hint = nearest(word, (*known, *LoadKeywords.__struct_fields__, *TAKEN_FOR_GRANTED))
            raise ConfigError(f"There is no setting {word!r}.", hint=hint)
    try:
        wished = msgspec.convert(wishes, LoadKeywords)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}.") from error
    if wished.use_4bit and chosen.setdefault("quantization", FOUR_BIT) != FOUR_BIT:
        raise ConfigError(f"use_4bit means {FOUR_BIT}, and quantization is {chosen['quantization']!r}.")
    return wished, chosen
