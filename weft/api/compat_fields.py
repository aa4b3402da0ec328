"""The fields of Ollama's and llama.cpp's interfaces that are accepted and change nothing, and why each does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from weft.api.openai.openai_schema import Fields

_MEMORY = "the operator says what is in memory, and where"
_CONTEXT = "the context is as long as the server's --max-model-len"
_SAMPLER = "there is no such sampler"
_WINDOW = "penalties look at the whole prompt and answer"
_TYPES = "the operator says it with --dtype"

_SAMPLERS: Mapping[str, str] = {
    "mirostat": _SAMPLER,
    "mirostat_eta": _SAMPLER,
    "mirostat_tau": _SAMPLER,
    "repeat_last_n": _WINDOW,
    "typical_p": _SAMPLER,
}

HINTS: Mapping[str, Mapping[str, str]] = {
    "ollama": {
        "context": "answers give none: the conversation is in `messages`",
        "keep_alive": "the operator says how long models stay in memory",
        "shift": _CONTEXT,
        "truncate": "a prompt that is too long is refused",
    },
    "ollama.embed": {
        "keep_alive": "the operator says how long models stay in memory",
        "options": "no option changes a vector",
    },
    "ollama.models": {
        "insecure": "hubs are always asked over TLS",
        "verbose": "all that is known is told",
        "system": "it is no part of the model",
        "template": "it is no part of the model",
        "options": "it is no part of the model",
    },
    "ollama.messages.tool_calls": {"type": "all calls are of functions"},
    "ollama.messages.tool_calls.function": {
        "description": "the tools have it",
        "index": "the order of the calls says it",
    },
    "ollama.options": {
        **_SAMPLERS,
        "draft_num_predict": "the operator says it with --speculative-model",
        "embedding_only": _MEMORY,
        "f16_kv": _TYPES,
        "logits_all": "`logprobs` gives them",
        "low_vram": _MEMORY,
        "main_gpu": _MEMORY,
        "num_batch": "the operator says it with --max-num-batched-tokens",
        "num_ctx": _CONTEXT,
        "num_gpu": _MEMORY,
        "num_gqa": "the model's files say it",
        "num_keep": "no prompt is cut",
        "num_thread": "the operator says it with --threads",
        "numa": _MEMORY,
        "penalize_newline": _WINDOW,
        "rope_frequency_base": "the model's files say it",
        "rope_frequency_scale": "the model's files say it",
        "tfs_z": _SAMPLER,
        "use_mlock": _MEMORY,
        "use_mmap": _MEMORY,
        "vocab_only": _MEMORY,
    },
    "llamacpp.completion": {
        **_SAMPLERS,
        "cache_prompt": "prompts that begin alike share their cached part anyway",
        "dry_allowed_length": _SAMPLER,
        "dry_base": _SAMPLER,
        "dry_multiplier": _SAMPLER,
        "dry_penalty_last_n": _SAMPLER,
        "dry_sequence_breakers": _SAMPLER,
        "dynatemp_exponent": _SAMPLER,
        "dynatemp_range": _SAMPLER,
        "id_slot": "the scheduler gives requests their rows",
        "min_keep": _SAMPLER,
        "n_discard": _CONTEXT,
        "n_indent": _SAMPLER,
        "n_keep": "no prompt is cut",
        "post_sampling_probs": "log probabilities are those before sampling",
        "repeat_last_n": _WINDOW,
        "return_progress": "a prompt's progress is not told",
        "samplers": "samplers have one order",
        "t_max_predict_ms": "the operator says it with --request-timeout-s",
        "timings_per_token": "the last piece has the timings",
        "top_n_sigma": _SAMPLER,
        "xtc_probability": _SAMPLER,
        "xtc_threshold": _SAMPLER,
    },
}
"""By the place of the object that has the field, by its name."""


class CompatFields(Fields):
    """An object of a request of Ollama's or llama.cpp's: the hints of its place are left aside."""

    place: ClassVar[str] = ""
    """Its place in `HINTS`."""

    @model_validator(mode="before")
    @classmethod
    def _without_hints(cls, value: Any) -> Any:
        hints = HINTS.get(cls.place, {})
        return {name: item for name, item in value.items() if name not in hints} if isinstance(value, dict) else value
