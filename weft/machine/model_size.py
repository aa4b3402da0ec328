"""Measures a model from its files alone: the geometry that its description gives, and the tensors that it has.

This reads what any engine may load, not only what Weft's own does: what a description does not tell is not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace
from safetensors import SafetensorError, safe_open

from weft.checkpoint.adapter_files import HELD_PER_NUMBER, WEIGHTS_FILE, adapter_paths
from weft.checkpoint.gguf import GgufFile, GgufTensor, read_gguf
from weft.checkpoint.model_files import ModelFiles
from weft.checkpoint.tokenizer_assets import model_facts
from weft.errors import ModelError
from weft.machine.memory import (
    NumberType,
    Shape,
    adapter_bytes,
    fp8_bytes,
    int4_bytes,
    int8_bytes,
    int8_head_bytes,
    num_parameters,
    slot_rank,
)
from weft.options import Config

PLAIN_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types of plain floats, which an engine may convert, and the bytes of each in a file."""
FP8, FP8_SCALES, INT8 = "F8_E4M3", ("weight_scale", "weight_scale_inv"), "I8"
INT4_NUMBERS, INT4_OTHERS = (".qweight", ".weight_packed"), (".qzeros", ".g_idx", "_zero_point", "_g_idx", "_shape")
"""The names of words of eight numbers of four bits, and of what is not held as it is stored."""
NOT_HELD = ("rotary_emb.inv_freq", "rope_freqs.weight")
"""Tensors that engines compute themselves and do not load."""
GGUF_EMBEDDING, GGUF_HEAD, HEAD = "token_embd.weight", "output.weight", "lm_head.weight"


class Geometry(Struct, frozen=True, kw_only=True):
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    tied_embeddings: bool


class Weights(Struct, frozen=True, kw_only=True):
    """The number of weights of a model."""

    floats: int = 0
    """Numbers that are plain floats in the files."""
    packed: int = 0
    """Numbers that the files hold quantised."""
    packed_bytes: int = 0
    panel_bytes: int = 0
    """Bytes of the quantised ones as the native engine's kernels of a CPU hold them; 0 where they cannot."""

    fp8: int = 0
    """Those of the quantised ones that are e4m3."""
    has_fp8_blocks: bool = False
    """True where blocks of them have scales of their own."""
    int4: int = 0
    """Those of the quantised ones that have four bits."""
    int4_scales: int = 0
    """Their scales, which are counted among the floats as well."""
    int8: int = 0
    """Those of the quantised ones that are int8."""
    block_bytes: int = 0
    """Bytes of all weights of a quantised GGUF file as the native engine holds them on a GPU; 0 for other files."""

    @property
    def is_quantised(self) -> bool:
        """True where the native engine holds weights on a GPU as the files have them."""
        return bool(self.fp8 or self.int4 or self.int8 or self.block_bytes)

    def held_bytes(self, dtype: NumberType, *, unpacked: bool) -> int:
        """Return the bytes of the weights as this type; of the quantised ones too, or as they are."""
        return self.floats * dtype.itemsize + (self.packed * dtype.itemsize if unpacked else self.packed_bytes)

    def held_in_panels(self, dtype: NumberType) -> int:
        """Return the bytes of the weights with the quantised ones as kernels of a CPU hold them."""
        return self.floats * dtype.itemsize + self.panel_bytes

    def held_as_integers(self, dtype: NumberType) -> int:
        """Return the bytes of the weights with those of four and eight bits as they are, and a zero beside every scale
        of four."""
        return (self.floats + self.int4_scales) * dtype.itemsize + self.int4 // 2 + self.int8

    def shared_by(self, size: int) -> Weights:
        """Return one of so many equal parts."""
        parts = {name: count // size for name, count in asdict(self).items() if type(count) is int}
        return replace(self, **parts)

    def __add__(self, other: Weights) -> Weights:
        return Weights(
            floats=self.floats + other.floats,
            packed=self.packed + other.packed,
            packed_bytes=self.packed_bytes + other.packed_bytes,
            panel_bytes=self.panel_bytes + other.panel_bytes,
            fp8=self.fp8 + other.fp8,
            has_fp8_blocks=self.has_fp8_blocks or other.has_fp8_blocks,
            int4=self.int4 + other.int4,
            int4_scales=self.int4_scales + other.int4_scales,
            int8=self.int8 + other.int8,
            block_bytes=self.block_bytes + other.block_bytes,
        )


PANEL_BYTES = {
    "Q4_0": 20, "Q4_1": 20, "Q4_K": 24, "Q5_0": 36, "Q5_1": 36, "Q8_0": 36, "Q5_K": 48, "Q6_K": 48,
}  # fmt: skip
"""Bytes of 32 weights in `kernels.quantised`'s panels, by their type in a GGUF file."""
FOUR_BITS, WITHOUT_MINIMA = {"Q4_0", "Q4_1", "Q4_K"}, {"Q4_0", "Q5_0", "Q8_0", "Q6_K"}
FUSED = {"attn_q": "qkv", "attn_k": "qkv", "attn_v": "qkv", "ffn_gate": "gate_up", "ffn_up": "gate_up"}


class ModelSize(Struct, frozen=True):
    geometry: Geometry | None
    """The geometry; None where the description lacks a part of it, or does not tell how large its cache is."""
    weights: Weights


def size_of(files: ModelFiles, header: GgufFile | None = None) -> ModelSize:
    """Measure a model by the headers of its files, of which a GGUF file's may have been read already. A model without
    files is as large as its geometry says."""
    if files.kind == "gguf":
        file = header or read_gguf(files.path)
        return ModelSize(_from_gguf(file), _gguf_weights(file))
    geometry = _from_config(model_facts(files))
    if files.kind == "dummy":
        return ModelSize(geometry, Weights(floats=num_parameters(geometry) if geometry is not None else 0))
    tied = geometry is not None and geometry.tied_embeddings
    left_out = (*NOT_HELD, HEAD) if tied else NOT_HELD
    return ModelSize(geometry, safetensors_weights(files.weight_files, left_out=left_out))


def safetensors_weights(files: Iterable[Path], *, left_out: tuple[str, ...] = NOT_HELD) -> Weights:
    """Count the weights of safetensors files, without the tensors whose names end so."""
    return sum((_file_weights(path, left_out) for path in files), start=Weights())


def _file_weights(path: Path, left_out: tuple[str, ...]) -> Weights:
    floats = packed = fp8 = int8 = int4 = scales = float_bytes = 0
    has_fp8_blocks = False
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_slice(name)
                shape, size = tensor.get_shape(), PLAIN_FLOATS.get(tensor.get_dtype())
                count = math.prod(shape)
                if size is None and name.endswith(INT4_NUMBERS):
                    int4 += count * 8
                elif size is None and not name.endswith(INT4_OTHERS):
                    packed += count
                    fp8 += count if tensor.get_dtype() == FP8 else 0
                    int8 += count if tensor.get_dtype() == INT8 else 0
                elif size is not None:
                    float_bytes += count * size
                    scales += count if name.endswith((".scales", ".weight_scale")) else 0
                    floats += 0 if name.endswith(left_out) else count
                    has_fp8_blocks |= name.endswith(FP8_SCALES) and len(shape) == 2 and shape[1] > 1
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}.") from error
    return Weights(
        floats=floats,
        packed=packed + int4,
        packed_bytes=path.stat().st_size - float_bytes if packed + int4 else 0,
        fp8=fp8,
        has_fp8_blocks=has_fp8_blocks,
        int4=int4,
        int4_scales=scales if int4 else 0,
        int8=int8,
    )


def _gguf_weights(file: GgufFile) -> Weights:
    held = [tensor for tensor in file.tensors.values() if not tensor.name.endswith(NOT_HELD)]
    packed = [tensor for tensor in held if tensor.type.block_size > 1]
    return Weights(
        floats=sum(math.prod(tensor.shape) for tensor in held if tensor.type.block_size == 1),
        packed=sum(math.prod(tensor.shape) for tensor in packed),
        packed_bytes=sum(tensor.nbytes for tensor in packed),
        panel_bytes=sum(math.prod(tensor.shape) // 32 * PANEL_BYTES.get(tensor.type.name, 128) for tensor in packed),
        block_bytes=_block_bytes(held) if packed else 0,
    )


def _block_bytes(held: list[GgufTensor]) -> int:
    """Return the bytes of a GGUF file's tensors on a GPU: linear weights as numbers of four or eight bits, in whole
    tiles of 64 rows and blocks of 128 columns, with scales and minima of two bytes for 32 columns; the rest as two
    bytes."""
    fused: dict[str, list[GgufTensor]] = {}
    for tensor in held:
        layer, _, part = tensor.name.removesuffix(".weight").rpartition(".")
        fused.setdefault(f"{layer}.{FUSED.get(part, part)}", []).append(tensor)
    total = 0
    for parts in fused.values():
        is_linear = parts[0].name.startswith("blk.") and all(part.type.block_size > 1 for part in parts)
        if not is_linear or any(len(part.shape) != 2 for part in parts):
            total += 2 * sum(math.prod(part.shape) for part in parts)
            continue
        names, columns = {part.type.name for part in parts}, parts[0].shape[1]
        rows = -(-sum(part.shape[0] for part in parts) // 64) * 64
        numbers = rows * -(-columns // 128) * 128
        beside = 2 if names <= WITHOUT_MINIMA else 4
        total += numbers // (2 if names <= FOUR_BITS else 1) + numbers // 32 * beside
    return total


def quantised_bytes(geometry: Shape, weights: Weights, quantization: str, dtype: NumberType, *, on_gpu: bool) -> int:
    """Return the bytes of weights that the native engine quantises while it loads them, or holds on a GPU as the files
    have them where no quantisation is asked for."""
    head = int8_head_bytes(geometry, dtype, in_panels=not on_gpu) if quantization else 0
    if quantization == "fp8" or (weights.fp8 and not quantization):
        return fp8_bytes(geometry, dtype, grouped=weights.has_fp8_blocks) + head
    if quantization in ("int4", "w4a8") and not weights.int4:
        return int4_bytes(geometry, dtype) + head
    if quantization == "int8" and not (weights.int8 and on_gpu):
        return int8_bytes(geometry, dtype, in_panels=not on_gpu) + head
    return (weights.block_bytes or weights.held_as_integers(dtype)) + head


def _from_config(facts: Mapping[str, Any]) -> Geometry | None:
    """Read the geometry from a config.json. A model of several parts has that of its decoder in text_config."""
    text = facts.get("text_config")
    facts = {**facts, **text} if isinstance(text, dict) else facts
    kinds = facts.get("layer_types")
    if "kv_lora_rank" in facts or (isinstance(kinds, list) and set(kinds) != {"full_attention"}):
        # Keys and values are held compressed, or not by every layer for every token.
        return None
    context, window = _size(facts, "max_position_embeddings"), _size(facts, "sliding_window")
    if window and facts.get("use_sliding_window", facts.get("model_type") == "mistral"):
        context = min(context, window)
    hidden, heads = _size(facts, "hidden_size"), _size(facts, "num_attention_heads")
    return _whole(
        Geometry(
            num_layers=_size(facts, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_size(facts, "num_key_value_heads", heads),
            head_dim=_size(facts, "head_dim", hidden // max(heads, 1)),
            hidden_size=hidden,
            intermediate_size=_size(facts, "intermediate_size"),
            vocab_size=_size(facts, "vocab_size"),
            max_position=context,
            tied_embeddings=bool(facts.get("tie_word_embeddings", False)),
        )
    )


def _from_gguf(file: GgufFile) -> Geometry | None:
    facts, kind = file.metadata, file.metadata.get("general.architecture")
    hidden, heads = _size(facts, f"{kind}.embedding_length"), _size(facts, f"{kind}.attention.head_count")
    embedding = file.tensors.get(GGUF_EMBEDDING)
    return _whole(
        Geometry(
            num_layers=_size(facts, f"{kind}.block_count"),
            num_heads=heads,
            num_kv_heads=_size(facts, f"{kind}.attention.head_count_kv", heads),
            head_dim=_size(facts, f"{kind}.attention.key_length", hidden // max(heads, 1)),
            hidden_size=hidden,
            intermediate_size=_size(facts, f"{kind}.feed_forward_length"),
            vocab_size=embedding.shape[0] if embedding is not None else 0,
            max_position=_size(facts, f"{kind}.context_length"),
            tied_embeddings=GGUF_HEAD not in file.tensors,
        )
    )


def _size(facts: Mapping[str, Any], key: str, default: int = 0) -> int:
    """Return a size; 0 for a value that is no size."""
    value = facts.get(key)
    if value is None:
        return default
    return value if type(value) is int and value > 0 else 0


def _whole(geometry: Geometry) -> Geometry | None:
    sizes = [size for name, size in asdict(geometry).items() if name != "tied_embeddings"]
    return geometry if all(sizes) else None


def adapters_bytes(config: Config, dtype: NumberType, slots_of: Shape | None = None) -> int:
    """Return the bytes of the largest adapters that may be loaded at once, or of the slots for them of a model on a
    GPU. One without a file is not counted."""
    if slots_of is not None:
        num_slots = config.scheduler.max_loras if config.model.wants_adapters else 0
        return num_slots * adapter_bytes(slots_of, slot_rank(largest_rank(config)), dtype)
    files = _adapter_files(config)
    sizes = [safetensors_weights([file]).held_bytes(dtype, unpacked=True) for file in files]
    return HELD_PER_NUMBER * sum(sorted(sizes, reverse=True)[: config.scheduler.max_loras])


def largest_rank(config: Config) -> int:
    """Return the largest rank of any layer of the adapters of `--adapter`; 0: there are none."""
    ranks = [0]
    for path in _adapter_files(config):
        try:
            with safe_open(path, framework="numpy") as file:
                names = [name for name in file.keys() if ".lora_A." in name]  # noqa: SIM118 - it is no mapping
                ranks += [rank for name in names for rank in file.get_slice(name).get_shape()[:1]]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a readable safetensors file: {error}.") from error
    return max(ranks)


def _adapter_files(config: Config) -> list[Path]:
    files = [Path(path).expanduser() / WEIGHTS_FILE for path in adapter_paths(config).values()]
    return [file for file in files if file.is_file()]
