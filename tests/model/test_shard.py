"""Ranks read their parts of a model alone, and together all of it, from every kind of file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.quantised_models import METHODS, save_quantised
from tests.tiny_adapters import save_adapter
from tests.tiny_models import SPECS
from weft.errors import ConfigError
from weft.hub.resolve import resolve
from weft.kernels.panel_format import PanelLayout
from weft.kernels.weights import DecoderWeights, LowRank, Weight
from weft.model.dense import DenseConfig
from weft.model.loader import LinearLoading, load_weights, open_model
from weft.model.lora import read_adapter
from weft.model.shard import WHOLE, Shard

Loaded = tuple[DenseConfig, DecoderWeights]


def read(path: Path, shard: Shard = WHOLE, linears: LinearLoading = "dequantise", lanes: int = 0) -> Loaded:
    files = resolve(str(path))
    panels = PanelLayout(lanes) if lanes else None
    with open_model(files) as (config, source):
        cpu = torch.device("cpu")
        loaded = load_weights(
            files, config, source, dtype=torch.float32, device=cpu, panels=panels, linears=linears, shard=shard
        )
        return config, loaded


def floats(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantised()


def check(path: Path, size: int, linears: LinearLoading = "dequantise", lanes: int = 0) -> None:
    """Ranks have what their parts of the whole are, cut here by heads, units and tokens; heads for keys and values that
    are fewer than the ranks are several ranks' own."""
    config, whole = read(path, linears=linears, lanes=lanes)
    ranks = [read(path, Shard(rank, size), linears, lanes)[1] for rank in range(size)]
    dim, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    for rank, own in enumerate(ranks):
        kv = range(rank * kv_heads // size, max((rank + 1) * kv_heads // size, rank * kv_heads // size + 1))
        q = range(rank * heads // size * dim, (rank + 1) * heads // size * dim)
        k = range((heads + kv[0]) * dim, (heads + kv[-1] + 1) * dim)
        v = range(k.start + kv_heads * dim, k.stop + kv_heads * dim)
        middle = config.intermediate_size
        gate = range(rank * middle // size, (rank + 1) * middle // size)
        for mine, all_ in zip(own.layers, whole.layers, strict=True):
            qkv, gate_up = floats(all_.qkv), floats(all_.gate_up)
            assert torch.equal(floats(mine.qkv), qkv[[*q, *k, *v]])
            assert torch.equal(floats(mine.output), floats(all_.output)[:, q])
            assert torch.equal(floats(mine.gate_up), gate_up[[*gate, *(middle + one for one in gate)]])
            assert torch.equal(floats(mine.down), floats(all_.down)[:, gate])
            if all_.qkv_bias is not None and mine.qkv_bias is not None:
                assert torch.equal(mine.qkv_bias, all_.qkv_bias[[*q, *k, *v]])
            assert (mine.output_bias is None) == (all_.output_bias is None or rank > 0)
    for table in ("embedding", "head"):
        parts = [floats(getattr(own, table)) for own in ranks]
        assert torch.equal(torch.cat(parts), floats(getattr(whole, table)))


@pytest.mark.parametrize("name", SPECS)
def test_every_family_is_cut_by_heads_units_and_tokens(name: str, tiny_directory: Callable[[str], Path]) -> None:
    for size in (2, 6) if name == "smollm2" else (2, 4):
        check(tiny_directory(name), size)


def test_a_vocabulary_need_not_be_divided_evenly(tiny_directory: Callable[[str], Path]) -> None:
    sizes = [len(floats(read(tiny_directory("smollm2"), Shard(rank, 6))[1].head)) for rank in range(6)]
    assert sum(sizes) == 320 and max(sizes) - min(sizes) == 1


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("lanes", [0, 8])
def test_gguf_files_are_cut_within_their_blocks(kind: str, lanes: int, tiny_gguf: Callable[[str, str], Path]) -> None:
    """Columns of 64 and 128 are parts of the 256 of a block of the K formats."""
    check(tiny_gguf("wide", kind), 4, lanes=lanes)


def test_blocks_may_be_cut_anywhere_where_they_become_floats(tiny_gguf: Callable[[str, str], Path]) -> None:
    """Twelve of 96 columns, in blocks of 32."""
    check(tiny_gguf("deepseek-llm", "Q4_0"), 8)


IN_ORDER = [method for method in METHODS if "order" not in method and "block" not in method]


@pytest.mark.parametrize("method", IN_ORDER)
def test_quantised_checkpoints_are_cut_by_words_and_groups(
    method: str, tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = save_quantised(tiny_directory("wide"), tmp_path / method, method)
    check(folder, 2)
    check(folder, 2, "keep")


def test_scales_of_blocks_are_cut_with_their_blocks(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    folder = save_quantised(tiny_directory("wide"), tmp_path / "blocks", "fp8-block")
    check(folder, 2)
    with pytest.raises(ConfigError, match="inside of a group of 128 weights"):
        read(folder, Shard(1, 4))


def test_columns_ordered_by_activations_cannot_be_cut(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    folder = save_quantised(tiny_directory("wide"), tmp_path / "order", "gptq-order")
    with pytest.raises(ConfigError, match="ordered by activations"):
        read(folder, Shard(1, 2))


def test_a_rank_reads_its_own_bytes_alone(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    """A file whose other bytes are no numbers does not harm it."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "torn"
    folder.mkdir()
    for file in tiny_directory("llama2").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "up_proj.weight", "lm_head.weight", "embed_tokens.weight")):
            tensor[len(tensor) // 2 :] = torch.nan
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:, tensor.shape[1] // 2 :] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    first, second = (read(folder, Shard(rank, 2))[1] for rank in (0, 1))
    assert all(floats(weight).isfinite().all() for weight in first.all_weights())
    assert not floats(second.head).isfinite().any()


def test_adapters_are_cut_as_the_weights_are(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    """What the ranks' parts add to a layer's output is what the whole adds."""
    config, _ = read(tiny_directory("llama3"))
    folder = save_adapter("llama3", tmp_path, 1)
    whole = read_adapter(folder, config, torch.float32)
    parts = [read_adapter(folder, config, torch.float32, Shard(rank, 2)) for rank in (0, 1)]
    for i, layer in enumerate(whole.layers):
        own = [part.layers[i] for part in parts]
        for name in ("output", "down"):
            product = torch.cat([products(getattr(one, name))[0] for one in own], dim=1)
            assert torch.allclose(product, products(getattr(layer, name))[0], atol=1e-6)
        for name in ("qkv", "gate_up"):
            for of_part, *shares in zip(*(products(getattr(one, name)) for one in (layer, *own)), strict=True):
                assert torch.allclose(torch.cat(shares), of_part, atol=1e-6)


def products(added: LowRank | None) -> list[Tensor]:
    """What an adapter adds to each part of a fused weight."""
    assert added is not None
    shrinks = torch.split(added.shrink, [one.shape[1] for one in added.expand])
    return [expand @ shrink for expand, shrink in zip(added.expand, shrinks, strict=True)]
