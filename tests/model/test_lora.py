"""Adapters are read as PEFT means them, or refused with the file and the reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_adapters import EVERY_PART, PREFIX, adapter_config, lora_tensors, modules, write_adapter
from tests.tiny_models import SPECS
from weft.errors import ModelError
from weft.hub.resolve import resolve
from weft.kernels.weights import AdapterWeights
from weft.model.dense import DenseConfig
from weft.model.loader import open_model, pairs_from_halves
from weft.model.lora import read_adapter

NAME = "llama3"
HIDDEN, MIDDLE, LAYERS = SPECS[NAME].hidden, SPECS[NAME].middle, SPECS[NAME].layers
QUERIES, KEYS = SPECS[NAME].heads * SPECS[NAME].head_dim, SPECS[NAME].kv_heads * SPECS[NAME].head_dim
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def geometry(tiny_directory: Callable[[str], Path]) -> DenseConfig:
    with open_model(resolve(str(tiny_directory(NAME)))) as (config, _):
        return config


def read(folder: Path, geometry: DenseConfig, dtype: torch.dtype = torch.float32) -> AdapterWeights:
    return read_adapter(folder, geometry, dtype)


def added(weights: AdapterWeights, layer: int, name: str) -> torch.Tensor:
    low_rank = getattr(weights.layers[layer], name)
    return torch.block_diag(*low_rank.expand) @ low_rank.shrink


def test_the_parts_of_a_fused_weight_stand_where_the_models_do(geometry: DenseConfig, tmp_path: Path) -> None:
    tensors = lora_tensors(NAME, 1)
    weights = read(write_adapter(tmp_path, adapter_config(), tensors), geometry)

    def product(part: str) -> torch.Tensor:
        module = next(module for module in modules(NAME) if module.endswith(part) and ".1." in module)
        a, b = (tensors[f"{PREFIX}{module}.lora_{which}.weight"] for which in "AB")
        return 2.0 * b @ a

    qkv, head_dim = added(weights, 1, "qkv"), SPECS[NAME].head_dim
    torch.testing.assert_close(qkv[:QUERIES], pairs_from_halves(product("q_proj"), head_dim))
    torch.testing.assert_close(qkv[QUERIES : QUERIES + KEYS], pairs_from_halves(product("k_proj"), head_dim))
    torch.testing.assert_close(qkv[QUERIES + KEYS :], product("v_proj"))
    torch.testing.assert_close(added(weights, 1, "output"), product("o_proj"))
    torch.testing.assert_close(added(weights, 1, "gate_up"), torch.cat([product("gate_proj"), product("up_proj")]))
    torch.testing.assert_close(added(weights, 1, "down"), product("down_proj"))
    assert weights.max_rank == 12 and weights.num_bytes > 0


@pytest.mark.parametrize(
    ("changes", "rank", "scale"),
    [
        ({}, 4, 2.0),
        ({"lora_alpha": 3}, 4, 0.75),
        ({"use_rslora": True}, 4, 4.0),
        ({"alpha_pattern": {"v_proj": 2}}, 4, 0.5),
        ({"alpha_pattern": {"up_proj": 2, "layers.0.self_attn.v_proj": 12}}, 4, 3.0),
        ({"alpha_pattern": {r"model\.layers\.\d+\.self_attn\.[kv]_proj": 16}}, 4, 4.0),
        ({"rank_pattern": {"v_proj": 2}}, 2, 4.0),
        ({"rank_pattern": {"v_proj": 2}, "use_rslora": True}, 2, 8 / 2**0.5),
        ({"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 5}}, 2, 2.5),
        ({"rank_pattern": None, "alpha_pattern": None, "init_lora_weights": "gaussian"}, 4, 2.0),
    ],
)
def test_ranks_and_scales(
    changes: dict[str, Any], rank: int, scale: float, geometry: DenseConfig, tmp_path: Path
) -> None:
    tensors = lora_tensors(NAME, 1, parts=("v_proj",), rank=rank)
    config = adapter_config(target_modules=["v_proj"], **changes)
    weights = read(write_adapter(tmp_path, config, tensors), geometry)
    a, b = (tensors[f"{PREFIX}model.layers.0.self_attn.v_proj.lora_{which}.weight"] for which in "AB")
    torch.testing.assert_close(added(weights, 0, "qkv")[QUERIES + KEYS :], scale * b @ a)
    assert not added(weights, 0, "qkv")[: QUERIES + KEYS].any()
    assert weights.layers[0].down is None


@pytest.mark.parametrize(
    ("targets", "parts"),
    [
        ("all-linear", EVERY_PART),
        (r".*\.(q|v)_proj", ("q_proj", "v_proj")),
        (r"model\.layers\.\d\.mlp\..*", ("gate_proj", "up_proj", "down_proj")),
        (["self_attn.o_proj"], ("o_proj",)),
    ],
)
def test_target_modules(
    targets: str | list[str], parts: tuple[str, ...], geometry: DenseConfig, tmp_path: Path
) -> None:
    config = adapter_config(target_modules=targets)
    weights = read(write_adapter(tmp_path, config, lora_tensors(NAME, 1, parts=parts)), geometry)
    assert (weights.layers[0].gate_up is not None) == ("gate_proj" in parts)
    assert (weights.layers[0].output is not None) == ("o_proj" in parts)


def test_some_layers_and_not_some_modules(geometry: DenseConfig, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in lora_tensors(NAME, 1).items() if ".1." in name and "o_proj" not in name}
    config = adapter_config(layers_to_transform=[1], exclude_modules=["o_proj"])
    weights = read(write_adapter(tmp_path, config, tensors), geometry)
    assert weights.layers[0] == (None,) * 4
    assert weights.layers[1].output is None and weights.layers[1].down is not None


def test_the_type_is_the_models(geometry: DenseConfig, tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in lora_tensors(NAME, 1).items()}
    weights = read(write_adapter(tmp_path, adapter_config(), tensors), geometry, torch.float16)
    low_rank = weights.layers[0].down
    assert low_rank is not None and {low_rank.shrink.dtype, low_rank.expand[0].dtype} == {torch.float16}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is [1]"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is [[0, 1]]"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"r": "4"}, "$.r"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": -1}, "lora_alpha is -1"),
        ({"rank_pattern": {"q_proj": 0}}, "q_proj is 0"),
        ({"target_modules": None}, "$.target_modules"),
        ({"target_modules": "(q_proj"}, "the pattern '(q_proj' cannot be used: a ( without its )"),
        ({"target_modules": "([a-z0-9_.]+)+!"}, "a group is repeated"),
        ({"exclude_modules": "(?=.*).*"}, "'?=' is not supported"),
        ({"alpha_pattern": {"*": 3}}, "the pattern '*' cannot be used"),
        ({"rank_pattern": {".*" * 3000: 3}}, "patterns of 6000 characters; at most 4000"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(
    changes: dict[str, Any], reason: str, geometry: DenseConfig, tmp_path: Path
) -> None:
    write_adapter(tmp_path, adapter_config(**changes), lora_tensors(NAME, 1))
    with pytest.raises(ModelError, match=re.escape(reason)) as refused:
        read(tmp_path, geometry)
    assert str(tmp_path / "adapter_config.json") in refused.value.message


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(f"{PREFIX}{name}")


def changed(name: str, to: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({f"{PREFIX}{name}": to})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without(f"{Q}.lora_A.weight"), f"there is no tensor '{PREFIX}{Q}.lora_A.weight'"),
        (without(f"{Q}.lora_B.weight"), f"there is no tensor '{PREFIX}{Q}.lora_B.weight'"),
        (
            changed(f"{Q}.lora_A.weight", torch.ones(4, HIDDEN + 1)),
            f"'{PREFIX}{Q}.lora_A.weight' has the shape (4, {HIDDEN + 1}); this model needs (4, {HIDDEN})",
        ),
        (changed(f"{Q}.lora_B.weight", torch.ones(QUERIES, 8)), f"has the shape ({QUERIES}, 8)"),
        (changed(f"{Q}.lora_A.weight", torch.ones(4)), "has the shape (4,)"),
        (changed(f"{Q}.lora_A.weight", torch.full((4, HIDDEN), torch.nan)), "not numbers, or too large"),
        (changed(f"{Q}.lora_B.weight", torch.full((QUERIES, 4), 3e38)), "not numbers, or too large"),
        (changed(f"{Q}.lora_A.weight", torch.ones(4, HIDDEN, dtype=torch.int32)), "not a floating-point type"),
        (changed("lm_head.lora_A.weight", torch.ones(4, HIDDEN)), "'base_model.model.lm_head.lora_A.weight' is for no"),
        (changed(f"model.layers.{LAYERS}.mlp.up_proj.lora_A.weight", torch.ones(4, HIDDEN)), "is for no"),
        (dict.clear, "there are no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], None], reason: str, geometry: DenseConfig, tmp_path: Path
) -> None:
    tensors = lora_tensors(NAME, 1)
    change(tensors)
    write_adapter(tmp_path, adapter_config(), tensors)
    with pytest.raises(ModelError, match=re.escape(reason)) as refused:
        read(tmp_path, geometry)
    assert str(tmp_path / "adapter_model.safetensors") in refused.value.message


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("adapter_config.json", None),
        ("adapter_config.json", b"{"),
        ("adapter_config.json", b"[]"),
        ("adapter_model.safetensors", None),
        ("adapter_model.safetensors", b"no header"),
    ],
)
def test_files_that_are_missing_or_broken_are_named(
    file: str, content: bytes | None, geometry: DenseConfig, tmp_path: Path
) -> None:
    write_adapter(tmp_path, adapter_config(), lora_tensors(NAME, 1))
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelError, match=re.escape(str(tmp_path / file))):
        read(tmp_path, geometry)


def test_a_file_that_ends_early_is_refused(geometry: DenseConfig, tmp_path: Path) -> None:
    write_adapter(tmp_path, adapter_config(), lora_tensors(NAME, 1))
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelError, match="no readable safetensors file"):
        read(tmp_path, geometry)
