"""Which architectures Weft runs, and how their facts become one configuration.

A family differs from another by data alone. To add one: a line in FAMILIES, and a tiny model in the parity test.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from weft.errors import ModelError
from weft.model.dense import DenseConfig
from weft.model.rope import RopeScaling


class Family(Struct, frozen=True):
    """What holds for every model of a family, whatever its configuration says."""

    qkv_bias: bool = False
    qk_norm: bool = False
    gguf_rope_pairs: bool = False
    """Whether GGUF files of this family hold queries and keys with rotary pairs as neighbours."""


FAMILIES = {
    "llama": Family(gguf_rope_pairs=True),
    "mistral": Family(gguf_rope_pairs=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
}


def family_of(name: str) -> Family:
    if name not in FAMILIES:
        raise ModelError(
            f"Models of the kind {name!r} are not supported.", hint=f"Supported: {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[name]


def config_from_huggingface(facts: Mapping[str, Any]) -> DenseConfig:
    """From a Hugging Face config.json."""
    name = _need(facts, "model_type", str)
    family = family_of(name)
    if facts.get("hidden_act", "silu") != "silu":
        raise ModelError(f"The activation {facts['hidden_act']!r} is not supported; only silu is.")
    if facts.get("mlp_bias"):
        raise ModelError("Models with biases in their MLP are not supported.")
    hidden, heads = _need(facts, "hidden_size", int), _need(facts, "num_attention_heads", int)
    rope = dict(facts.get("rope_scaling") or {}) | dict(facts.get("rope_parameters") or {})
    bias = bool(facts.get("attention_bias", False))
    max_position = _need(facts, "max_position_embeddings", int)
    window = facts.get("sliding_window")
    if window and facts.get("use_sliding_window", name == "mistral"):
        max_position = min(max_position, window)
    return _checked(
        DenseConfig(
            family=name,
            hidden_size=hidden,
            num_layers=_need(facts, "num_hidden_layers", int),
            num_heads=heads,
            num_kv_heads=facts.get("num_key_value_heads") or heads,
            head_dim=facts.get("head_dim") or hidden // heads,
            intermediate_size=_need(facts, "intermediate_size", int),
            vocab_size=_need(facts, "vocab_size", int),
            max_position=max_position,
            norm_eps=float(facts.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or facts.get("rope_theta") or 10000.0),
            rope_scaling=_rope_scaling(rope, max_position),
            qkv_bias=family.qkv_bias or bias,
            output_bias=bias and not family.qkv_bias,
            qk_norm=family.qk_norm,
            tied_embeddings=bool(facts.get("tie_word_embeddings", False)),
        )
    )


def config_from_gguf(facts: Mapping[str, Any], *, vocab_size: int, tied_embeddings: bool) -> DenseConfig:
    """From the metadata of a GGUF file; the vocabulary's size is that of its embedding."""
    name = _need(facts, "general.architecture", str)
    family = family_of(name)

    def need(key: str) -> int:
        return int(_need(facts, f"{name}.{key}", int))

    hidden, heads = need("embedding_length"), need("attention.head_count")
    max_position = need("context_length")
    scaling: dict[str, Any] = {}
    if facts.get(f"{name}.rope.scaling.type") not in (None, "none"):
        scaling = {
            "rope_type": facts[f"{name}.rope.scaling.type"],
            "factor": facts.get(f"{name}.rope.scaling.factor", 1.0),
        }
    return _checked(
        DenseConfig(
            family=name,
            hidden_size=hidden,
            num_layers=need("block_count"),
            num_heads=heads,
            num_kv_heads=int(facts.get(f"{name}.attention.head_count_kv", heads)),
            head_dim=int(facts.get(f"{name}.attention.key_length", hidden // heads)),
            intermediate_size=need("feed_forward_length"),
            vocab_size=vocab_size,
            max_position=max_position,
            norm_eps=float(facts.get(f"{name}.attention.layer_norm_rms_epsilon", 1e-6)),
            rope_theta=float(facts.get(f"{name}.rope.freq_base", 10000.0)),
            rope_scaling=_rope_scaling(scaling, max_position),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            tied_embeddings=tied_embeddings,
        )
    )


def _rope_scaling(rope: Mapping[str, Any], max_position: int) -> RopeScaling:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position=int(rope.get("original_max_position_embeddings", max_position)),
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


def _need(facts: Mapping[str, Any], key: str, kind: type) -> Any:
    value = facts.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ModelError(f"The model's configuration has no usable {key!r} (found {value!r}).")
    return value
