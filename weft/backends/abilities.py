"""What a request asks for against what its engine can: one check, made where the request enters the engine.

Every door and the Python API come through there, so none of them can drop what an engine does not take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from weft.backends.contract import PLAIN_TERMS, Abilities, Terms, not_taken, tokens_unknown
from weft.errors import WeftError
from weft.types import SamplingParams


class NotSupported(WeftError):
    """This kind of engine cannot do it at all, however it is asked."""

    status = 501
    grpc_code = "UNIMPLEMENTED"
    kind = "not_implemented"


class Able(Protocol):
    """The part of an engine that is looked at."""

    @property
    def name(self) -> str: ...

    @property
    def abilities(self) -> Abilities: ...


class FieldRule(Struct, frozen=True):
    """A field of requests: the ability that it needs, and whether these parameters make use of it."""

    field: str
    ability: str
    by: Callable[[SamplingParams], bool]


FIELD_RULES = (
    FieldRule("seed", "seed", lambda params: params.seed is not None),
    FieldRule("presence_penalty", "penalties", lambda params: params.presence_penalty != 0),
    FieldRule("frequency_penalty", "penalties", lambda params: params.frequency_penalty != 0),
    FieldRule("repetition_penalty", "repetition_penalty", lambda params: params.repetition_penalty != 1),
    FieldRule("top_k", "top_k", lambda params: params.top_k != 0),
    FieldRule("min_p", "min_p", lambda params: params.min_p != 0),
    FieldRule("logit_bias", "logit_bias", lambda params: bool(params.logit_bias)),
    FieldRule("logprobs", "logprobs", lambda params: params.logprobs is not None),
    FieldRule("prompt_logprobs", "prompt_logprobs", lambda params: params.prompt_logprobs is not None),
    FieldRule("stop_token_ids", "stop_tokens", lambda params: bool(params.stop_token_ids)),
    FieldRule("min_tokens", "min_tokens", lambda params: params.min_tokens > 0),
    FieldRule("ignore_eos", "ignore_eos", lambda params: params.ignore_eos),
    FieldRule("include_stop_str_in_output", "stop_in_output", lambda params: params.include_stop_str_in_output),
    FieldRule("skip_special_tokens", "special_tokens", lambda params: not params.skip_special_tokens),
    FieldRule("structured_outputs", "grammar", lambda params: bool(params.grammar)),
)

NEED_TOKENS = frozenset({"logprobs", "prompt_logprobs"})


def check_abilities(engine: Able, params: SamplingParams, terms: Terms = PLAIN_TERMS) -> None:
    """Raise InvalidRequest for the first thing that this engine does not take."""
    for rule in FIELD_RULES:
        if rule.by(params) and not getattr(engine.abilities, rule.ability):
            if rule.field in NEED_TOKENS and not engine.abilities.tokens:
                raise tokens_unknown(engine.name, rule.field, rule.field)
            raise not_taken(engine.name, rule.field)
    for field, ability in (("priority", "priority"), ("cache_salt", "cache_salt"), ("adapter", "lora")):
        if getattr(terms, field) and not getattr(engine.abilities, ability):
            raise not_taken(engine.name, field)


def cannot(engine_name: str, what: str) -> NotSupported:
    """For a method of the contract that this kind of engine has no answer to."""
    return NotSupported(f"The engine {engine_name} cannot {what}.", hint="`weft engines` lists those that there are.")
