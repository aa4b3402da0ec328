"""The size of a model from its files alone is the size of what is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.tiny_models import SPECS
from weft.checkpoint.model_files import ModelFiles, dummy_files, model_at
from weft.kernels.panel_format import PanelLayout, format_for
from weft.machine.memory import num_parameters
from weft.machine.model_size import PANEL_BYTES, Geometry, size_of
from weft.model.dequant import FORMATS
from weft.model.loader import load_weights, open_model

CPU = torch.device("cpu")


def compare(files: ModelFiles, dtype: torch.dtype) -> None:
    """Compare the size with what Weft's own engine makes of the files."""
    size = size_of(files)
    with open_model(files) as (config, source):
        weights = load_weights(files, config, source, dtype=dtype, device=CPU)
    assert size.geometry is not None
    for name in Geometry.__struct_fields__:
        assert getattr(size.geometry, name) == getattr(config, name), name
    assert size.weights.held_bytes(dtype, unpacked=True) == weights.num_bytes


@pytest.mark.parametrize("name", SPECS)
def test_a_directory_is_as_large_as_what_is_loaded(name: str, tiny_directory: Callable[[str], Path]) -> None:
    compare(model_at(tiny_directory(name)), torch.float32)


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.in_gguf])
def test_a_gguf_file_is_as_large_as_what_is_loaded(name: str, tiny_gguf: Callable[[str, str], Path]) -> None:
    compare(model_at(tiny_gguf(name, "Q8_0")), torch.bfloat16)


def test_what_is_kept_quantised_has_the_size_that_it_has_in_the_file(tiny_gguf: Callable[[str, str], Path]) -> None:
    weights = size_of(model_at(tiny_gguf("smollm2", "Q8_0"))).weights
    assert weights.packed_bytes == weights.packed // 32 * 34
    assert weights.held_bytes(torch.float16, unpacked=False) == weights.packed_bytes + 2 * weights.floats
    assert weights.floats > 0, "norms are not quantised"


@pytest.mark.parametrize("type_name", PANEL_BYTES)
def test_weights_in_panels_are_as_large_as_kernels_hold_them(type_name: str) -> None:
    known = FORMATS[type_name]
    wanted = format_for(known.bits, known.group_size, half_scales=known.half_scales)
    assert wanted.bytes_per_row == PANEL_BYTES[type_name]


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_1"])
def test_a_gguf_file_in_panels_is_as_large_as_what_is_loaded(
    type_name: str, tiny_gguf: Callable[[str, str], Path]
) -> None:
    files = model_at(tiny_gguf("smollm2", type_name))
    with open_model(files) as (config, source):
        weights = load_weights(files, config, source, dtype=torch.float32, device=CPU, panels=PanelLayout(16))
    assert size_of(files).weights.held_in_panels(torch.float32) == weights.num_bytes


def test_a_shape_alone_is_counted_by_its_geometry(tiny_directory: Callable[[str], Path]) -> None:
    size = size_of(dummy_files(tiny_directory("qwen3")))
    assert size.geometry is not None and size.weights.floats == num_parameters(size.geometry) > 0


def config_json(folder: Path, **facts: Any) -> ModelFiles:
    plain = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "vocab_size": 320, "max_position_embeddings": 512,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(plain | facts))
    return dummy_files(folder)


@pytest.mark.parametrize(
    "facts",
    [
        {"hidden_size": None},
        {"hidden_size": "64"},
        {"num_hidden_layers": 0},
        {"num_attention_heads": -4},
        {"num_key_value_heads": 2.5},
        {"kv_lora_rank": 512},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ],
    ids=str,
)
def test_what_a_description_does_not_tell_is_not_guessed(tmp_path: Path, facts: dict[str, Any]) -> None:
    assert size_of(config_json(tmp_path, **facts)).geometry is None


def test_a_model_of_several_parts_has_the_geometry_of_its_text_part(tmp_path: Path) -> None:
    text = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2}
    geometry = size_of(config_json(tmp_path, text_config=text, layer_types=["full_attention"] * 3)).geometry
    assert geometry is not None
    assert (geometry.num_layers, geometry.hidden_size, geometry.num_kv_heads, geometry.head_dim) == (3, 128, 2, 16)
    assert geometry.vocab_size == 320


def test_tensors_that_are_no_floats_are_counted_as_they_are(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.up_proj.qweight": torch.zeros(1000, 50, dtype=torch.int32),
        "model.norm.weight": torch.zeros(300, dtype=torch.float16),
        "lm_head.weight": torch.zeros(320, 64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config_json(tmp_path, tie_word_embeddings=True)
    weights = size_of(model_at(tmp_path)).weights
    assert (weights.floats, weights.packed) == (300, 400_000), "a tied head is the embedding; a word has eight numbers"
    assert weights.packed_bytes == pytest.approx(200_000, rel=0.01)
