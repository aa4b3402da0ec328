"""Loading: a model that is whole is read to the last tensor, and one that is not is refused with its reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import tiny_models
from weft.errors import ModelError
from weft.hub.resolve import resolve
from weft.kernels.weights import DecoderWeights
from weft.model.dense import DenseConfig
from weft.model.loader import load_weights, open_model


def read(path: Path, dtype: torch.dtype = torch.float32) -> tuple[DenseConfig, DecoderWeights]:
    files = resolve(str(path))
    with open_model(files) as (config, source):
        return config, load_weights(files, config, source, dtype=dtype, device=torch.device("cpu"))


@pytest.fixture
def copied(tiny_directory: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A tiny directory that a test may damage."""
    return lambda name: Path(shutil.copytree(tiny_directory(name), tmp_path / name))


@contextmanager
def changed_tensors(folder: Path) -> Iterator[dict[str, Tensor]]:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    yield tensors
    save_file(tensors, path)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# What is loaded.


def test_projections_are_fused(tiny_directory: Callable[[str], Path]) -> None:
    config, weights = read(tiny_directory("mistral"))
    state = tiny_models.state("mistral")
    # 4 query heads and 2 key-value heads of 32 dimensions, over 64 hidden ones.
    assert config.heads == (4, 2, 32)
    for i, layer in enumerate(weights.layers):
        assert layer.qkv.shape == (128 + 64 + 64, 64)
        assert layer.gate_up.shape == (96 + 96, 64)
        assert layer.output.shape == (64, 128)
        assert layer.qkv_bias is layer.q_norm is layer.k_norm is layer.output_bias is None
        assert torch.equal(layer.qkv[192:], state[f"model.layers.{i}.self_attn.v_proj.weight"])
        assert torch.equal(layer.gate_up[:96], state[f"model.layers.{i}.mlp.gate_proj.weight"])
        assert torch.equal(layer.gate_up[96:], state[f"model.layers.{i}.mlp.up_proj.weight"])


def test_rotary_pairs_are_neighbours(tiny_directory: Callable[[str], Path]) -> None:
    _, weights = read(tiny_directory("mistral"))
    queries = tiny_models.state("mistral")["model.layers.0.self_attn.q_proj.weight"]
    # The second head's first pair is its dimensions 0 and 16.
    assert torch.equal(weights.layers[0].qkv[32], queries[32])
    assert torch.equal(weights.layers[0].qkv[33], queries[32 + 16])
    assert torch.equal(weights.layers[0].qkv[34], queries[33])


@pytest.mark.parametrize("name", [name for name, spec in tiny_models.SPECS.items() if spec.in_gguf])
def test_a_gguf_file_holds_the_tensors_of_the_directory(
    name: str, tiny_directory: Callable[[str], Path], tiny_gguf: Callable[[str, str], Path]
) -> None:
    _, theirs = read(tiny_directory(name))
    _, ours = read(tiny_gguf(name, "F32"))
    for a, b in zip(theirs.layers, ours.layers, strict=True):
        for part, other in zip(a, b, strict=True):
            assert (part is None) == (other is None)
            assert part is None or torch.equal(part, other)
    assert torch.equal(theirs.embedding, ours.embedding)
    assert torch.equal(theirs.norm, ours.norm) and torch.equal(theirs.head, ours.head)


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_tied_embeddings_share_memory(
    name: str, tiny_directory: Callable[[str], Path], tiny_gguf: Callable[[str, str], Path]
) -> None:
    for path in (tiny_directory(name), tiny_gguf(name, "F32")):
        config, weights = read(path)
        assert config.tied_embeddings
        assert weights.head.data_ptr() == weights.embedding.data_ptr()
        assert weights.num_bytes == 4 * sum(tensor.numel() for tensor in tiny_models.state(name).values())


def test_a_head_beside_tied_embeddings_is_passed_over(copied: Callable[[str], Path]) -> None:
    folder = copied("smollm2")
    with changed_tensors(folder) as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    _, weights = read(folder)
    assert weights.head is weights.embedding


def test_an_untied_head_is_its_own(tiny_directory: Callable[[str], Path]) -> None:
    _, weights = read(tiny_directory("llama2"))
    assert weights.head.data_ptr() != weights.embedding.data_ptr()
    assert torch.equal(weights.head, tiny_models.state("llama2")["lm_head.weight"])


def test_inverse_frequencies_of_old_checkpoints_are_passed_over(copied: Callable[[str], Path]) -> None:
    folder = copied("llama2")
    with changed_tensors(folder) as tensors:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    read(folder)


def test_weights_are_rounded_to_the_type_asked_for(
    tiny_directory: Callable[[str], Path], tiny_gguf: Callable[[str, str], Path]
) -> None:
    expected = tiny_models.state("llama2")["model.layers.0.mlp.down_proj.weight"].to(torch.bfloat16)
    for path in (tiny_directory("llama2"), tiny_gguf("llama2", "F32")):
        _, weights = read(path, torch.bfloat16)
        assert torch.equal(weights.layers[0].down, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_checkpoint_of_another_type_is_converted(dtype: torch.dtype, copied: Callable[[str], Path]) -> None:
    folder = copied("mistral")
    with changed_tensors(folder) as tensors:
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(dtype)
    _, weights = read(folder)
    queries = tiny_models.state("mistral")["model.layers.1.self_attn.q_proj.weight"].to(dtype).float()
    by_pairs = queries.view(4, 2, 16, 64).transpose(1, 2).reshape(128, 64)
    assert torch.equal(weights.layers[1].qkv[:128], by_pairs)
    assert weights.layers[1].qkv.dtype == weights.embedding.dtype == torch.float32


def test_progress_hears_of_every_layer(tiny_directory: Callable[[str], Path]) -> None:
    heard = []
    files = resolve(str(tiny_directory("llama2")))
    with open_model(files) as (config, source):
        load_weights(
            files,
            config,
            source,
            dtype=torch.float32,
            device=torch.device("cpu"),
            progress=lambda done, total: heard.append((done, total)),
        )
    assert heard == [(1, 3), (2, 3), (3, 3)]


# What is refused.


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.k_proj.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.self_attn.q_proj.bias",
    ],
)
def test_a_missing_tensor(name: str, copied: Callable[[str], Path]) -> None:
    folder = copied("qwen2")
    with changed_tensors(folder) as tensors:
        del tensors[name]
    with pytest.raises(ModelError, match=f"no tensor '{name}'"):
        read(folder)


def test_a_wrong_shape(copied: Callable[[str], Path]) -> None:
    folder = copied("llama2")
    with changed_tensors(folder) as tensors:
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(64, 96)
    with pytest.raises(ModelError, match=r"up_proj\.weight' has the shape \(64, 96\); expected \(96, 64\)"):
        read(folder)


def test_a_shape_that_could_be_broadcast_is_wrong_as_well(copied: Callable[[str], Path]) -> None:
    folder = copied("llama2")
    with changed_tensors(folder) as tensors:
        tensors["model.norm.weight"] = torch.ones(1)
    with pytest.raises(ModelError, match=r"model\.norm\.weight' has the shape \(1,\); expected \(64,\)"):
        read(folder)


def test_a_tensor_that_the_family_does_not_know(copied: Callable[[str], Path]) -> None:
    folder = copied("llama2")
    with changed_tensors(folder) as tensors:
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    with pytest.raises(ModelError, match=r"1 tensors that its kind does not know: model\.layers\.0\.self_attn\.q_norm"):
        read(folder)


def test_more_layers_than_the_configuration_says(copied: Callable[[str], Path]) -> None:
    folder = copied("llama2")
    change_config(folder, num_hidden_layers=2)
    with pytest.raises(ModelError, match=r"does not know: model\.layers\.2"):
        read(folder)


def test_an_unknown_architecture(copied: Callable[[str], Path]) -> None:
    folder = copied("llama2")
    change_config(folder, model_type="mamba")
    with pytest.raises(ModelError, match="'mamba' are not supported") as caught:
        read(folder)
    assert "llama" in caught.value.hint and "qwen3" in caught.value.hint


def test_an_unsupported_rope(copied: Callable[[str], Path]) -> None:
    folder = copied("llama2")
    change_config(folder, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(ModelError, match="rope scaling 'yarn' is not supported") as caught:
        read(folder)
    assert "llama3" in caught.value.hint


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_a_truncated_file(keep: int, copied: Callable[[str], Path]) -> None:
    path = copied("llama2") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        read(path.parent)


def test_a_file_cut_after_it_was_resolved(copied: Callable[[str], Path]) -> None:
    files = resolve(str(copied("llama2")))
    path = files.weight_files[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"), open_model(files):
        pass


def test_a_missing_shard(copied: Callable[[str], Path]) -> None:
    folder = copied("llama3")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"1 of 3 weight files are missing: model-00002-of-00003\.safetensors"):
        read(folder)


def test_a_shard_that_the_index_does_not_name(copied: Callable[[str], Path]) -> None:
    folder = copied("llama3")
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    left = {name: shard for name, shard in weight_map.items() if "00002" not in shard}
    index.write_text(json.dumps({"weight_map": left}))
    with pytest.raises(ModelError, match="no tensor") as caught:
        read(folder)
    assert "shard" in caught.value.hint


def gguf_with(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A tiny GGUF model whose tensors (by name) were changed before they were written."""
    import gguf

    tensors = {"token_embd.weight": (8, 32), "output_norm.weight": (32,)}
    for name, shape in (("attn_norm", (32,)), ("ffn_norm", (32,)), ("ffn_down", (32, 64))):
        tensors[f"blk.0.{name}.weight"] = shape
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        tensors[f"blk.0.{name}.weight"] = (32, 32)
    for name in ("ffn_gate", "ffn_up"):
        tensors[f"blk.0.{name}.weight"] = (64, 32)
    change(tensors)
    path = tmp_path / "changed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    for name, shape in tensors.items():
        writer.add_tensor(name, torch.ones(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_changed_gguf_loads_when_nothing_is_changed(tmp_path: Path) -> None:
    read(gguf_with(tmp_path, lambda tensors: None))


def test_a_gguf_file_without_a_tensor(tmp_path: Path) -> None:
    for name in ("token_embd.weight", "blk.0.ffn_up.weight"):
        with pytest.raises(ModelError, match=name):
            read(gguf_with(tmp_path, lambda tensors, name=name: tensors.pop(name)))


def test_a_gguf_file_with_a_tensor_of_another_kind(tmp_path: Path) -> None:
    def add_bias(tensors: dict[str, Any]) -> None:
        tensors["blk.0.attn_q.bias"] = (32,)

    with pytest.raises(ModelError, match=r"does not know: blk\.0\.attn_q\.bias"):
        read(gguf_with(tmp_path, add_bias))


def test_rope_factors_of_a_wrong_shape(tmp_path: Path) -> None:
    def add_factors(tensors: dict[str, Any]) -> None:
        tensors["rope_freqs.weight"] = (5,)

    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        read(gguf_with(tmp_path, add_factors))
