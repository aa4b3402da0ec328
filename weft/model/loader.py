"""Loads the weights of a decoder from files: names are mapped, projections fused, rotary pairs made neighbours.

Every tensor is written straight to its place in the fused weights on the device, and what has to be changed in it is
changed there: the peak is the model and one tensor, on the device and on the host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from weft.checkpoint import gguf, tokenizer_assets
from weft.checkpoint.model_files import ModelFiles
from weft.errors import ModelError
from weft.kernels.fp8 import E4M3, GROUP, Fp8Weight, quantise_rows
from weft.kernels.int_weights import IntGroups, IntWeight, int8_rows, is_multiplied, joined, quantised_groups
from weft.kernels.int_weights import pack as pack_ints
from weft.kernels.panel_format import BLOCK, PanelLayout, format_for
from weft.kernels.quantised import QuantisedWeight, pack
from weft.kernels.weights import DecoderWeights, LayerWeights, Table, Weight
from weft.model.architectures import architecture_of, config_from_gguf, config_from_huggingface
from weft.model.dense import DenseConfig
from weft.model.dequant import BlockFormat, Groups, block_format, dequantise, unpack
from weft.model.int4_formats import SUFFIXES, Int4Format, int4_format, read_int4
from weft.model.safetensors_source import SafetensorsSource
from weft.model.shard import WHOLE, Cut, CutSource, Shard, ShardedSource

HUGGINGFACE_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "model.layers.{}.input_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "output": "model.layers.{}.self_attn.o_proj.weight",
    "output_bias": "model.layers.{}.self_attn.o_proj.bias",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}
GGUF_NAMES = {
    "embedding": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "attention_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "q_bias": "blk.{}.attn_q.bias",
    "k_bias": "blk.{}.attn_k.bias",
    "v_bias": "blk.{}.attn_v.bias",
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "output": "blk.{}.attn_output.weight",
    "output_bias": "blk.{}.attn_output.bias",
    "mlp_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
}
GGUF_ROPE_FACTORS = "rope_freqs.weight"
_NOT_WEIGHTS = re.compile(
    r"rotary_emb\.inv_freq$|^rope_freqs\.weight$|_proj\.(weight_scale(_inv)?|(in|out)put_(scale|zero_point))$"
    r"|self_attn\.[qkv]_scale$"
)
"""Tensors that are no weights. Inputs are quantised with scales of their own: a checkpoint's are not needed."""
FP8_SCALES = ("weight_scale", "weight_scale_inv")
"""The names of the scales of an e4m3 weight: those of vLLM and compressed-tensors, and that of DeepSeek."""


class Source(Protocol):
    """Tensors by name, whatever the file format."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read_into(self, out: Tensor, name: str) -> None: ...

    @property
    def int4(self) -> Int4Format | None:
        """The packing of linear weights of four bits; None where there are none."""

    def number_type(self, name: str) -> str:
        """Return the type of a tensor as safetensors files call it; empty for one of blocks, or where there is none."""

    def block_format(self, name: str) -> BlockFormat | None:
        """Return how whole numbers are packed in a tensor; None for one of floats."""

    def groups(self, name: str, device: torch.device) -> Groups:
        """Return a tensor of whole numbers as such, on a device."""


class NoSource:
    """The source of a dummy model, which has no tensors: its weights are random."""

    int4 = None

    def names(self) -> set[str]:
        return set()

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def read_into(self, out: Tensor, name: str, cut: Cut | None = None) -> None:
        raise KeyError(name)

    def number_type(self, name: str) -> str:
        return ""

    def block_format(self, name: str) -> BlockFormat | None:
        return None

    def groups(self, name: str, device: torch.device, cut: Cut | None = None) -> Groups:
        raise KeyError(name)


class GgufSource:
    int4 = None

    def __init__(self, files: ModelFiles) -> None:
        self.file = gguf.read_gguf(files.path)
        self._raw = gguf.map_tensors(self.file)

    def names(self) -> set[str]:
        return set(self.file.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.tensors[name].shape

    def read_into(self, out: Tensor, name: str, cut: Cut | None = None) -> None:
        raw, shape, columns = self._blocks(name, cut)
        kind = self.file.tensors[name].type.name
        if out.shape == shape:
            dequantise(raw.to(out.device), kind, shape, out=out)
        else:
            out.copy_(dequantise(raw.to(out.device), kind, shape)[..., columns])

    def number_type(self, name: str) -> str:
        return ""

    def block_format(self, name: str) -> BlockFormat | None:
        known = block_format(self.file.tensors[name].type.name)
        return None if known.unpack is None else known

    def groups(self, name: str, device: torch.device, cut: Cut | None = None) -> Groups:
        raw, shape, columns = self._blocks(name, cut)
        groups = unpack(raw.to(device), self.file.tensors[name].type.name, shape)
        if columns == slice(0, shape[-1]):
            return groups

        def part(tensor: Tensor) -> Tensor:
            by_row = tensor.reshape(shape[0], -1)
            size = by_row.shape[1]
            return by_row[:, columns.start * size // shape[1] : columns.stop * size // shape[1]]

        numbers, scales, minima = map(part, groups[:3])
        return groups._replace(numbers=numbers, scales=scales, minima=minima)

    def _blocks(self, name: str, cut: Cut | None) -> tuple[Tensor, tuple[int, ...], slice]:
        """Return the bytes of the blocks in which a part of a tensor lies, the shape of those, and the part's columns
        among theirs."""
        info, raw = self.file.tensors[name], torch.from_numpy(self._raw[name])
        if cut is None:
            return raw, info.shape, slice(0, info.shape[-1])
        size, (first, stop, _) = info.type.block_size, cut[-1].indices(info.shape[-1])
        begin, end = first // size, -(-stop // size)
        blocks = raw.view(*info.shape[:-1], -1, info.type.block_bytes)[cut[:-1]][..., begin:end, :]
        shape = (*blocks.shape[:-2], (end - begin) * size)
        return blocks.reshape(-1), shape, slice(first - begin * size, stop - begin * size)


@contextmanager
def open_model(files: ModelFiles) -> Iterator[tuple[DenseConfig, CutSource]]:
    """Open a model: its configuration, and its tensors while the context lasts."""
    with ExitStack() as stack:
        if files.kind == "gguf":
            source = GgufSource(files)
            embedding = source.file.tensors.get(GGUF_NAMES["embedding"])
            if embedding is None or len(embedding.shape) != 2:
                raise ModelError(f"{files.path.name} has no embedding {GGUF_NAMES['embedding']!r}.")
            yield (
                config_from_gguf(
                    source.file.metadata,
                    vocab_size=embedding.shape[0],
                    tied_embeddings=GGUF_NAMES["head"] not in source.file.tensors,
                ),
                source,
            )
        else:
            facts = tokenizer_assets.model_facts(files)
            dummy = files.kind == "dummy"
            yield (
                config_from_huggingface(facts),
                NoSource() if dummy else SafetensorsSource(files, stack, int4_format(facts)),
            )


LinearLoading: TypeAlias = Literal["dequantise", "keep", "fp8", "int4", "int8", "w4a8"]
"""It says how the decoder's linear weights are held: as floats, as the files have them, or quantised."""
_QUANTISED_ROWS = 1 << 14
"""Rows of a weight that are quantised at a time."""


def load_weights(
    files: ModelFiles,
    config: DenseConfig,
    source: CutSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    panels: PanelLayout | None = None,
    linears: LinearLoading = "dequantise",
    shard: Shard = WHOLE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DecoderWeights:
    """Read every tensor of the model, or a shard's part of it; `progress` is called with layers done and layers in all.
    With a layout for `panels`, linear weights that a GGUF file has as whole numbers stay so; `linears` says how others
    are held."""
    loading = _DummyLoading if files.kind == "dummy" else _Loading
    if shard.size == 1:
        return loading(files, config, source, dtype, device, panels, linears).decoder(progress)
    names = GGUF_NAMES if files.kind == "gguf" else HUGGINGFACE_NAMES
    own, cut = shard.config(config), ShardedSource(source, names, config, shard)
    weights = loading(files, own, cut, dtype, device, panels, linears).decoder(progress)
    # The outputs of all ranks are added up: one of them has the bias in it.
    layers = [layer._replace(output_bias=None) if shard.rank else layer for layer in weights.layers]
    return weights._replace(layers=layers)


class _Loading:
    def __init__(
        self,
        files: ModelFiles,
        config: DenseConfig,
        source: Source,
        dtype: torch.dtype,
        device: torch.device,
        panels: PanelLayout | None,
        linears: LinearLoading,
    ) -> None:
        is_gguf = files.kind == "gguf"
        self.config = config
        self.source = source
        self.dtype = dtype
        self.device = device
        self.panels = panels
        self.linears = linears
        self.names = GGUF_NAMES if is_gguf else HUGGINGFACE_NAMES
        self.rope_pairs = is_gguf and architecture_of(config.family).gguf_rope_pairs
        self.unread = {name for name in source.names() if not _NOT_WEIGHTS.search(name)}

    def decoder(self, progress: Callable[[int, int], None]) -> DecoderWeights:
        config = self.config
        embedding = self.table({"embedding": config.vocab_size}, config.hidden_size)
        layers = []
        for i in range(config.num_layers):
            layers.append(self.layer(i))
            progress(i + 1, config.num_layers)
        norm = self.one("norm", (config.hidden_size,))
        head = self.head(embedding)
        self.pass_over_empty_biases()
        if self.unread:
            some = ", ".join(sorted(self.unread)[:3])
            raise ModelError(f"The model has {len(self.unread)} tensors that its kind does not know: {some}.")
        return DecoderWeights(embedding, layers, norm, head, self.rope_factors())

    def head(self, embedding: Table) -> Weight:
        """Return the weight of the logits. It has eight bits where layers are quantised while they are loaded: no layer
        is as large, and of eight bits the logits are almost the same."""
        if self.config.tied_embeddings:
            self.unread.discard(self.names["head"])
            head = embedding
        else:
            head = self.table({"head": self.config.vocab_size}, self.config.hidden_size)
        if self.linears not in ("keep", "dequantise") and isinstance(head, Tensor):
            if self.linears in ("fp8", "w4a8") and self.panels is None:
                # Inputs of the head are rounded as those of layers are. No CPU loads this.
                from weft.kernels.rotated import SIDE, rotated_weight

                if head.shape[1] % SIDE == 0:
                    return rotated_weight(head)
            return self.int8_weight(head)
        return head

    def rope_factors(self) -> Tensor | None:
        if GGUF_ROPE_FACTORS not in self.source.names():
            return None
        shape, expected = self.source.shape(GGUF_ROPE_FACTORS), (self.config.head_dim // 2,)
        if shape != expected:
            raise ModelError(f"The tensor {GGUF_ROPE_FACTORS!r} has the shape {shape}; expected {expected}.")
        factors = torch.empty(shape)
        self.source.read_into(factors, GGUF_ROPE_FACTORS)
        return factors

    def layer(self, i: int) -> LayerWeights:
        config, heads = self.config, self.config.heads
        q_rows, kv_rows = heads.q_size, heads.kv_size // 2
        hidden, middle, per_head = config.hidden_size, config.intermediate_size, (config.head_dim,)
        with_bias = config.qkv_bias
        return LayerWeights(
            attention_norm=self.one("attention_norm", (hidden,), i),
            qkv=self.linear({"q": q_rows, "k": kv_rows, "v": kv_rows}, hidden, i),
            qkv_bias=self.fused({"q_bias": q_rows, "k_bias": kv_rows, "v_bias": kv_rows}, (), i) if with_bias else None,
            q_norm=self.one("q_norm", per_head, i) if config.qk_norm else None,
            k_norm=self.one("k_norm", per_head, i) if config.qk_norm else None,
            output=self.linear({"output": hidden}, q_rows, i),
            output_bias=self.one("output_bias", (hidden,), i) if config.output_bias else None,
            mlp_norm=self.one("mlp_norm", (hidden,), i),
            gate_up=self.linear({"gate": middle, "up": middle}, hidden, i),
            down=self.linear({"down": hidden}, middle, i),
        )

    def linear(self, parts: dict[str, int], columns: int, layer: int) -> Weight:
        """Return the weight of a linear layer of several parts."""
        if self.linears == "fp8" or (self.linears == "keep" and self.has_fp8(parts, layer)):
            return self.fp8_weight(parts, columns, layer)
        if self.linears in ("keep", "int4", "w4a8") and all(self.has_int4(part, layer) for part in parts):
            return self.for_inputs(self.int4_weight(parts, columns, layer))
        if self.linears in ("keep", "int8") and self.panels is None and all(self.has_int8(one, layer) for one in parts):
            return self.packed([self.read_int8(part, rows, columns, layer) for part, rows in parts.items()])
        if self.linears == "keep" and (read := self.block_groups(parts, columns, layer)) is not None:
            return pack_ints(joined(read), self.dtype)
        if self.linears in ("int4", "w4a8"):
            return self.for_inputs(pack_ints(quantised_groups(self.fused(parts, (columns,), layer)), self.dtype))
        if self.linears == "int8":
            return self.int8_weight(self.fused(parts, (columns,), layer))
        return self.table(parts, columns, layer)

    def for_inputs(self, weight: Weight) -> Weight:
        """Return a weight of four bits, with what it takes where the inputs of many tokens are rounded."""
        if self.linears != "w4a8" or not isinstance(weight, IntWeight) or weight.order is not None:
            return weight
        return weight.for_fp8_inputs()

    def table(self, parts: dict[str, int], columns: int, layer: int = -1) -> Table:
        """Return a weight of several parts, in panels where it can be."""
        quantised = self.quantised(parts, columns, layer) if self.panels is not None else None
        return self.fused(parts, (columns,), layer) if quantised is None else quantised

    def quantised(self, parts: dict[str, int], columns: int, layer: int) -> QuantisedWeight | None:
        """Return the weight as the files have it, or None where they have floats, or parts that are no whole panels."""
        assert self.panels is not None
        if columns % BLOCK or (len(parts) > 1 and any(rows % self.panels.lanes for rows in parts.values())):
            return None
        known = self.block_formats(parts, columns, layer)
        if known is None:
            return None
        bits, group_size = max(one.bits for one in known), min(one.group_size for one in known)
        read = self.read_groups(parts, columns, layer)
        return self.in_panels(read, bits, group_size, half_scales=all(one.half_scales for one in known))

    def in_panels(self, read: list[Groups], bits: int, group_size: int, *, half_scales: bool) -> QuantisedWeight:
        """Lay parts out in panels, with scales of half precision where all fit."""
        assert self.panels is not None
        for half in (half_scales, False):
            wanted = format_for(bits, group_size, half_scales=half)
            try:
                packed = [pack(*one[:3], wanted, self.panels, in_pairs=one.in_pairs) for one in read]
            except OverflowError:
                continue
            panels = packed[0].panels if len(packed) == 1 else torch.cat([one.panels for one in packed])
            return QuantisedWeight(panels, wanted, self.panels, sum(one.num_rows for one in packed))
        raise AssertionError("float32 holds every scale")

    def block_formats(self, parts: dict[str, int], columns: int, layer: int) -> list[BlockFormat] | None:
        """Return how whole numbers are packed in each part; None where one has floats."""
        names = [self.found(part, layer, (rows, columns)) for part, rows in parts.items()]
        known = [one for one in map(self.source.block_format, names) if one is not None]
        return known if len(known) == len(names) else None

    def read_groups(self, parts: dict[str, int], columns: int, layer: int) -> list[Groups]:
        """Return the numbers, scales and minima of parts, each by its rows."""
        read = []
        for part, rows in parts.items():
            name = self.found(part, layer, (rows, columns))
            self.unread.discard(name)
            groups = self.source.groups(name, self.device)
            numbers, scales, minima = (one.reshape(rows, -1) for one in groups[:3])
            if self.turns(part):
                numbers, scales, minima = (
                    pairs_from_halves(one, self.config.head_dim) for one in (numbers, scales, minima)
                )
            read.append(Groups(numbers, scales, minima, groups.zero, groups.in_pairs))
        return read

    def block_groups(self, parts: dict[str, int], columns: int, layer: int) -> list[IntGroups] | None:
        """Return parts as a GGUF file has them, with eight bits where not all have four; None where one has floats."""
        known = self.block_formats(parts, columns, layer) if self.names is GGUF_NAMES else None
        if known is None:
            return None
        bits = max(one.bits for one in known)
        return [int_groups(one, bits, self.dtype) for one in self.read_groups(parts, columns, layer)]

    def int8_weight(self, weight: Tensor) -> Weight:
        """Quantise floats to eight bits: with a scale for each row, or in a CPU's panels for each block of it."""
        if self.panels is None:
            # In parts: as float32 the whole of a head may be too large.
            return pack_ints(joined([int8_rows(part) for part in torch.split(weight, _QUANTISED_ROWS)]), self.dtype)
        if weight.shape[1] % BLOCK:
            return weight
        numbers, scales, *_ = int8_rows(weight, BLOCK)
        unsigned = Groups(numbers.view(torch.uint8) ^ 128, scales, scales * -128)
        return self.in_panels([unsigned], 8, BLOCK, half_scales=True)

    def has_fp8(self, parts: dict[str, int], layer: int) -> bool:
        return any(self.source.number_type(self.names[part].format(layer)) == "F8_E4M3" for part in parts)

    def fp8_weight(self, parts: dict[str, int], columns: int, layer: int) -> Fp8Weight:
        """Return the weight as e4m3. Parts of other floats are quantised."""
        whole = torch.empty((sum(parts.values()), columns), dtype=E4M3, device=self.device)
        scales, start = [], 0
        for part, rows in parts.items():
            numbers = whole[start : start + rows]
            if self.has_fp8({part: rows}, layer):
                scales.append(self.read_fp8(numbers, part, layer))
            else:
                quantised = quantise_rows(self.fused({part: rows}, (columns,), layer))
                numbers.copy_(quantised.numbers)
                scales.append(quantised.scales.T)
            start += rows
        num_groups = max(map(len, scales))
        return Fp8Weight(whole, torch.cat([one.expand(num_groups, -1) for one in scales], dim=1).contiguous())

    def read_fp8(self, out: Tensor, part: str, layer: int) -> Tensor:
        """Read a part that the files have as e4m3, and return its scales as [groups, rows]."""
        name = self.found(part, layer, tuple(out.shape))
        self.unread.discard(name)
        self.source.read_into(out, name)
        scales = self.fp8_scales(name, *out.shape)
        if self.turns(part):
            # Not every device indexes e4m3.
            stored = out.view(torch.uint8)
            stored.copy_(pairs_from_halves(stored, self.config.head_dim))
            scales = pairs_from_halves(scales.T, self.config.head_dim).T
        return scales

    def fp8_scales(self, name: str, rows: int, columns: int) -> Tensor:
        """Return the scales of a weight, which is multiplied by them, as [groups, rows]."""
        names = [f"{name.removesuffix('weight')}{one}" for one in FP8_SCALES]
        found = next((one for one in names if one in self.source.names()), None)
        if found is None:
            kind = "int8" if self.source.number_type(name) == "I8" else "FP8"
            raise ModelError(f"The model has no tensor {names[0]!r}.", hint=f"{name!r} is of {kind}, and needs scales.")
        shape, blocks = self.source.shape(found), (-(-rows // GROUP), -(-columns // GROUP))
        if shape not in ((), (1,), (rows,), (rows, 1), blocks):
            raise ModelError(
                f"The tensor {found!r} has the shape {shape}; expected one scale, {rows} of them, or {blocks}.",
                hint=f"Blocks of {GROUP} x {GROUP} are supported.",
            )
        read = torch.empty(shape, dtype=torch.float32, device=self.device)
        self.source.read_into(read, found)
        if shape == blocks:
            return read.repeat_interleave(GROUP, dim=0)[:rows].T
        return read.reshape(1, -1).expand(1, rows)

    def has_int4(self, part: str, layer: int) -> bool:
        return (
            self.source.int4 is not None
            and f"{self.stem(part, layer)}{self.source.int4.numbers}" in self.source.names()
        )

    def stem(self, part: str, layer: int) -> str:
        return self.names[part].format(layer).removesuffix("weight")

    def int4_weight(self, parts: dict[str, int], columns: int, layer: int) -> Weight:
        """Return the weight as the files have it, or as floats where its parts have groups of different columns."""
        read = [self.read_int4(part, rows, columns, layer) for part, rows in parts.items()]
        size = read[0].group_size
        if not is_multiplied(size, columns):
            raise ModelError(
                f"Weights of four bits in groups of {size} columns are not supported.",
                hint="Groups of 32, 64, multiples of 128 and whole rows are; --dtype float32 dequantises.",
            )
        return self.packed(read)

    def packed(self, read: list[IntGroups]) -> Weight:
        size, order = read[0].group_size, read[0].order
        if any(one.group_size != size or not _is_same(one.order, order) for one in read):
            return torch.cat([one.dequantised().to(self.dtype) for one in read])
        return pack_ints(joined(read), self.dtype)

    def has_int8(self, part: str, layer: int) -> bool:
        return self.source.number_type(self.names[part].format(layer)) == "I8"

    def read_int8(self, part: str, rows: int, columns: int, layer: int) -> IntGroups:
        """Read a part that compressed-tensors has as int8, with one scale or one for each row."""
        name = self.found(part, layer, (rows, columns))
        self.unread.discard(name)
        numbers = torch.empty((rows, columns), dtype=torch.int8, device=self.device)
        self.source.read_into(numbers, name)
        scales = self.fp8_scales(name, rows, columns)
        if len(scales) > 1:
            raise ModelError(f"The scales of {name!r} are for blocks; int8 has one scale for each row, or one in all.")
        return self.turned(part, IntGroups(numbers, scales.T, None, columns))

    def read_int4(self, part: str, rows: int, columns: int, layer: int) -> IntGroups:
        assert self.source.int4 is not None
        stem = self.stem(part, layer)
        self.unread.difference_update(f"{stem}{suffix}" for suffix in SUFFIXES)
        return self.turned(part, read_int4(self.source, self.source.int4, stem, rows, columns, self.device))

    def turned(self, part: str, groups: IntGroups) -> IntGroups:
        if not self.turns(part):
            return groups
        turned = partial(pairs_from_halves, head_dim=self.config.head_dim)
        zeros = None if groups.zeros is None else turned(groups.zeros)
        return groups._replace(numbers=turned(groups.numbers), scales=turned(groups.scales), zeros=zeros)

    def pass_over_empty_biases(self) -> None:
        """Pass over biases that GPTQ wrote for layers that have none, which are zeros."""
        if self.source.int4 is None:
            return
        for name in [name for name in self.unread if name.endswith("_proj.bias")]:
            bias = torch.empty(self.source.shape(name))
            self.source.read_into(bias, name)
            if not bias.any():
                self.unread.discard(name)

    def one(self, part: str, shape: tuple[int, ...], layer: int = -1) -> Tensor:
        return self.fused({part: shape[0]}, shape[1:], layer)

    def fused(self, parts: dict[str, int], rest: tuple[int, ...], layer: int) -> Tensor:
        """Return one tensor of several parts, each with its rows, one below the other."""
        whole = torch.empty((sum(parts.values()), *rest), dtype=self.dtype, device=self.device)
        start = 0
        for part, rows in parts.items():
            self.read_into(whole[start : start + rows], part, layer)
            start += rows
        return whole

    def read_into(self, out: Tensor, part: str, layer: int) -> None:
        if self.has_int4(part, layer):
            rows, columns = out.shape
            out.copy_(self.read_int4(part, rows, columns, layer).dequantised())
            return
        if self.has_int8(part, layer):
            rows, columns = out.shape
            out.copy_(self.read_int8(part, rows, columns, layer).dequantised())
            return
        if self.has_fp8({part: len(out)}, layer):
            numbers = torch.empty(out.shape, dtype=E4M3, device=out.device)
            out.copy_(Fp8Weight(numbers, self.read_fp8(numbers, part, layer)).dequantised())
            return
        name = self.found(part, layer, tuple(out.shape))
        self.unread.discard(name)
        self.source.read_into(out, name)
        if self.turns(part):
            out.copy_(pairs_from_halves(out, self.config.head_dim))

    def found(self, part: str, layer: int, expected: tuple[int, ...]) -> str:
        """Return the name of a tensor that was not read yet, after a check of its shape."""
        name = self.names[part].format(layer)
        if name not in self.unread:
            raise ModelError(f"The model has no tensor {name!r}.", hint="Is a shard missing?")
        shape = self.source.shape(name)
        if shape != expected:
            raise ModelError(f"The tensor {name!r} has the shape {shape}; expected {expected}.")
        return name

    def turns(self, part: str) -> bool:
        """Return whether rotary pairs of a part are halves of a head, and must become neighbours."""
        return part.split("_")[0] in ("q", "k") and not self.rope_pairs


class _DummyLoading(_Loading):
    def read_into(self, out: Tensor, part: str, layer: int) -> None:
        if part.endswith("norm"):
            out.fill_(1)
        elif not out.is_meta:
            out.normal_(std=0.02)


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def int_groups(groups: Groups, bits: int, dtype: torch.dtype) -> IntGroups:
    """Return blocks of a GGUF file, by their rows, as numbers of four or eight bits in groups of 32. Those in smaller
    groups, of Q6_K, are rounded to eight bits again."""
    numbers, scales, minima = groups[:3]
    if groups.in_pairs:
        pairs = numbers.view(len(numbers), -1, BLOCK // 2)
        numbers = torch.cat([pairs & 15, pairs >> 4], dim=2).flatten(1)
    if numbers.shape[1] // scales.shape[1] != BLOCK:
        by_group = numbers.view(*scales.shape, -1).float() - groups.zero
        return int8_rows((by_group * scales[..., None]).flatten(1), BLOCK, dtype)
    if bits == 8:
        numbers = (numbers - groups.zero).view(torch.int8)
    return IntGroups(numbers, scales, None, BLOCK, minima=None if groups.zero else minima)


def pairs_from_halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head so that the two halves of a rotary pair become neighbours."""
    halves = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)
