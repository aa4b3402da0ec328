"""From a model's own description to Weft's configuration."""

from __future__ import annotations

from typing import Any

import pytest

from weft.errors import ModelError
from weft.model.architectures import config_from_gguf, config_from_huggingface
from weft.model.dense import DenseConfig
from weft.model.rope import RopeScaling, rotations

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FACTS: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
GGUF_FACTS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 128,
    "llama.block_count": 3,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.feed_forward_length": 256,
    "llama.context_length": 2048,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
}


def configured(**changes: Any) -> DenseConfig:
    return config_from_huggingface(FACTS | changes)


def from_gguf(changes: dict[str, Any] | None = None) -> DenseConfig:
    return config_from_gguf(GGUF_FACTS | (changes or {}), vocab_size=1000, tied_embeddings=True)


# Hugging Face.


def test_the_geometry() -> None:
    config = configured()
    assert (config.family, config.hidden_size, config.num_layers, config.intermediate_size) == ("llama", 128, 3, 256)
    assert config.heads == (8, 2, 16)
    assert (config.vocab_size, config.max_position, config.norm_eps) == (1000, 2048, 1e-5)
    assert not (config.qkv_bias or config.output_bias or config.qk_norm or config.tied_embeddings)


def test_without_key_value_heads_every_head_has_its_own() -> None:
    for absent in ({"num_key_value_heads": None}, {}):
        facts = {key: value for key, value in FACTS.items() if key != "num_key_value_heads"} | absent
        assert config_from_huggingface(facts).num_kv_heads == 8


def test_head_dim_is_its_own_fact() -> None:
    assert configured(head_dim=32).heads.q_size == 256
    assert configured(head_dim=None).head_dim == 16


def test_what_a_family_always_has() -> None:
    assert configured(model_type="qwen2").qkv_bias
    assert not configured(model_type="qwen2").output_bias
    assert configured(model_type="qwen3").qk_norm
    assert not configured(model_type="qwen3").qkv_bias


def test_attention_bias_is_of_all_four_projections() -> None:
    config = configured(attention_bias=True)
    assert config.qkv_bias and config.output_bias


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 10000.0},
        {"rope_theta": 10000.0, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_theta": 10000.0, "rope_scaling": {"type": "default"}},
    ],
)
def test_plain_rope(rope: dict[str, Any]) -> None:
    config = configured(**rope)
    assert (config.rope_theta, config.rope_scaling) == (10000.0, RopeScaling())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
    ],
)
def test_llama3_rope_old_and_new(rope: dict[str, Any]) -> None:
    config = configured(**rope)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 20000.0, "rope_scaling": {"rope_type": "linear", "factor": 4}},
        {"rope_theta": 20000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 20000, "factor": 4.0}},
    ],
)
def test_linear_rope_old_and_new(rope: dict[str, Any]) -> None:
    config = configured(**rope)
    assert (config.rope_theta, config.rope_scaling) == (20000.0, RopeScaling(kind="linear", factor=4.0))


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "su"])
def test_other_ropes_are_refused(kind: str) -> None:
    for rope in ({"rope_scaling": {"type": kind, "factor": 2.0}}, {"rope_parameters": {"rope_type": kind}}):
        with pytest.raises(ModelError, match=f"rope scaling '{kind}' is not supported"):
            configured(**rope)


def test_a_sliding_window_bounds_the_context() -> None:
    assert configured(model_type="mistral", sliding_window=1024).max_position == 1024
    assert configured(model_type="mistral", sliding_window=None).max_position == 2048
    assert configured(model_type="mistral", sliding_window=4096).max_position == 2048
    assert configured(model_type="qwen2", sliding_window=1024, use_sliding_window=False).max_position == 2048
    assert configured(model_type="qwen2", sliding_window=1024, use_sliding_window=True).max_position == 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_neox"}, "'gpt_neox' are not supported"),
        ({"model_type": None}, "no usable 'model_type'"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"mlp_bias": True}, "biases in their MLP"),
        ({"hidden_size": None}, "no usable 'hidden_size'"),
        ({"hidden_size": "128"}, "no usable 'hidden_size'"),
        ({"hidden_size": True}, "no usable 'hidden_size'"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_layers is 1000000000"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"num_key_value_heads": 3}, "8 heads of 16 dimensions over 3 key-value heads"),
        ({"head_dim": 15}, "15 dimensions"),
    ],
)
def test_a_description_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        configured(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"num_key_value_heads": "2"},
        {"num_key_value_heads": [2, 2, 2]},
        {"head_dim": 16.5},
        {"rms_norm_eps": "small"},
        {"rms_norm_eps": float("nan")},
        {"rope_scaling": "linear"},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "linear", "factor": 0}},
        {"rope_scaling": {"type": "llama3", "factor": 8.0}},
        {"rope_theta": "10000"},
        {"rope_parameters": ["default"]},
        {"sliding_window": "1024", "model_type": "mistral"},
    ],
    ids=str,
)
def test_a_value_of_the_wrong_type_is_a_model_error(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        configured(**changes)


# GGUF.


def test_a_gguf_geometry() -> None:
    config = from_gguf()
    assert (config.family, config.hidden_size, config.num_layers, config.intermediate_size) == ("llama", 128, 3, 256)
    assert config.heads == (8, 2, 16)
    assert (config.vocab_size, config.max_position, config.norm_eps) == (1000, 2048, 1e-5)
    assert (config.rope_theta, config.rope_scaling, config.tied_embeddings) == (500000.0, RopeScaling(), True)


def test_a_gguf_head_dim_and_linear_rope() -> None:
    config = from_gguf(
        {"llama.attention.key_length": 32, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    )
    assert config.head_dim == 32
    assert config.rope_scaling == RopeScaling(kind="linear", factor=4.0)
    assert from_gguf({"llama.rope.scaling.type": "none"}).rope_scaling == RopeScaling()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "'mamba' are not supported"),
        ({"llama.block_count": "3"}, "no usable 'llama.block_count'"),
        ({"llama.context_length": 0}, "max_position is 0"),
        ({"llama.attention.head_count": [8, 8, 8]}, "no usable 'llama.attention.head_count'"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
    ],
)
def test_a_gguf_description_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_gguf(changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"llama.attention.head_count": 0},
        {"llama.attention.head_count_kv": [2, 2, 2]},
        {"llama.attention.head_count_kv": "2"},
        {"llama.rope.freq_base": "high"},
        {"llama.rope.scaling.type": 1},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": "four"},
    ],
    ids=str,
)
def test_a_gguf_value_of_the_wrong_type_is_a_model_error(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        from_gguf(changes)


# Rotations.


def test_rotations_are_of_every_position_and_pair() -> None:
    table = rotations(4, 100.0, RopeScaling(), 8)
    assert table.shape == (8, 2)
    assert table[0].tolist() == [1, 1]
    assert table[5, 0].angle().item() == pytest.approx(5 - 2 * 3.14159265, abs=1e-5)
    assert table[5, 1].angle().item() == pytest.approx(0.5, abs=1e-6)


def test_linear_scaling_slows_every_pair() -> None:
    plain = rotations(8, 10000.0, RopeScaling(), 16)
    scaled = rotations(8, 10000.0, RopeScaling(kind="linear", factor=4.0), 64)
    assert scaled[::4].real == pytest.approx(plain.real, abs=1e-5)
