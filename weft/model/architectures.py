"""The architectures that Weft supports, and how a checkpoint's facts become one configuration.

Architectures differ by data alone. To add one: a line in ARCHITECTURES, and a tiny model in the parity test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from weft.errors import ModelError
from weft.model.dense import DenseConfig
from weft.model.rope import RopeScaling


class Architecture(Struct, frozen=True):
    """The facts that hold for every model of an architecture, whatever its configuration says."""

    qkv_bias: bool = False
    qk_norm: bool = False
    gguf_rope_pairs: bool = False
    """True when GGUF files of this architecture store the two halves of a rotary pair as neighbours."""


ARCHITECTURES = {
    "llama": Architecture(gguf_rope_pairs=True),
    "mistral": Architecture(gguf_rope_pairs=True),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(qk_norm=True),
}


def architecture_of(name: str) -> Architecture:
    if name not in ARCHITECTURES:
        raise ModelError(
            f"Models of the kind {name!r} are not supported.", hint=f"Supported: {', '.join(sorted(ARCHITECTURES))}."
        )
    return ARCHITECTURES[name]


def config_from_huggingface(facts: Mapping[str, Any]) -> DenseConfig:
    """Return the configuration from a Hugging Face config.json."""
    name = _need(facts, "model_type", str)
    architecture = architecture_of(name)
    if facts.get("hidden_act", "silu") != "silu":
        raise ModelError(f"The activation {facts['hidden_act']!r} is not supported; only silu is.")
    if facts.get("mlp_bias"):
        raise ModelError("Models with biases in their MLP are not supported.")
    hidden, heads = _need(facts, "hidden_size", int), _need(facts, "num_attention_heads", int)
    rope = {**_get(facts, "rope_scaling", dict, {}), **_get(facts, "rope_parameters", dict, {})}
    bias = bool(facts.get("attention_bias", False))
    max_position = _need(facts, "max_position_embeddings", int)
    window = _get(facts, "sliding_window", int, 0)
    if window and facts.get("use_sliding_window", name == "mistral"):
        max_position = min(max_position, window)
    return _checked(
        DenseConfig(
            family=name,
            hidden_size=hidden,
            num_layers=_need(facts, "num_hidden_layers", int),
            num_heads=heads,
            num_kv_heads=_get(facts, "num_key_value_heads", int, heads),
            head_dim=_get(facts, "head_dim", int, hidden // max(heads, 1)),
            intermediate_size=_need(facts, "intermediate_size", int),
            vocab_size=_need(facts, "vocab_size", int),
            max_position=max_position,
            norm_eps=_positive(facts, "rms_norm_eps", 1e-6),
            rope_theta=_positive(rope, "rope_theta", _positive(facts, "rope_theta", 10000.0)),
            rope_scaling=_rope_scaling(rope, max_position),
            qkv_bias=architecture.qkv_bias or bias,
            output_bias=bias and not architecture.qkv_bias,
            qk_norm=architecture.qk_norm,
            tied_embeddings=bool(facts.get("tie_word_embeddings", False)),
        )
    )


def config_from_gguf(facts: Mapping[str, Any], *, vocab_size: int, tied_embeddings: bool) -> DenseConfig:
    """Return the configuration from the metadata of a GGUF file; the vocabulary's size is that of its embedding."""
    name = _need(facts, "general.architecture", str)
    architecture = architecture_of(name)

    def need(key: str) -> int:
        return int(_need(facts, f"{name}.{key}", int))

    hidden, heads = need("embedding_length"), need("attention.head_count")
    max_position = need("context_length")
    scaling: dict[str, Any] = {}
    if facts.get(f"{name}.rope.scaling.type") not in (None, "none"):
        scaling = {
            "rope_type": facts[f"{name}.rope.scaling.type"],
            "factor": _positive(facts, f"{name}.rope.scaling.factor", 1.0),
        }
    return _checked(
        DenseConfig(
            family=name,
            hidden_size=hidden,
            num_layers=need("block_count"),
            num_heads=heads,
            num_kv_heads=_get(facts, f"{name}.attention.head_count_kv", int, heads),
            head_dim=_get(facts, f"{name}.attention.key_length", int, hidden // max(heads, 1)),
            intermediate_size=need("feed_forward_length"),
            vocab_size=vocab_size,
            max_position=max_position,
            norm_eps=_positive(facts, f"{name}.attention.layer_norm_rms_epsilon", 1e-6),
            rope_theta=_positive(facts, f"{name}.rope.freq_base", 10000.0),
            rope_scaling=_rope_scaling(scaling, max_position),
            qkv_bias=architecture.qkv_bias,
            qk_norm=architecture.qk_norm,
            tied_embeddings=tied_embeddings,
        )
    )


def _rope_scaling(rope: Mapping[str, Any], max_position: int) -> RopeScaling:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=_positive(rope, "factor"))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=_positive(rope, "factor"),
            low_freq_factor=_positive(rope, "low_freq_factor"),
            high_freq_factor=_positive(rope, "high_freq_factor"),
            original_max_position=_get(rope, "original_max_position_embeddings", int, max_position),
        )
    raise ModelError(f"The rope scaling {kind!r} is not supported.", hint="Supported: default, linear, llama3.")


_CEILINGS = {
    "hidden_size": 2**17,
    "num_layers": 2**10,
    "num_heads": 2**12,
    "num_kv_heads": 2**12,
    "head_dim": 2**10,
    "intermediate_size": 2**20,
    "vocab_size": 2**22,
    "max_position": 2**24,
}


def _checked(config: DenseConfig) -> DenseConfig:
    for name, ceiling in _CEILINGS.items():
        value = getattr(config, name)
        if not 0 < value <= ceiling:
            raise ModelError(f"The model's configuration is damaged: {name} is {value}.")
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ModelError(
            f"The model's configuration is damaged: {config.num_heads} heads of {config.head_dim} dimensions "
            f"over {config.num_kv_heads} key-value heads."
        )
    return config


def _get(facts: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """Return a fact that may be absent, or null."""
    return default if facts.get(key) is None else _need(facts, key, kind)


def _positive(facts: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = facts.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"The model's configuration has no usable {key!r} (found {value!r}).")
    return float(value)


def _need(facts: Mapping[str, Any], key: str, kind: type) -> Any:
    value = facts.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ModelError(f"The model's configuration has no usable {key!r} (found {value!r}).")
    return value
