"""Tiny random models of every family: as Hugging Face directories, and as GGUF files.

They are made from a fixed seed with torch and safetensors alone, since transformers takes long to import; the parity
tests prove that transformers reads the directories as they are. The GGUF files are written as llama.cpp's converter
writes them, from the names that the gguf package knows.
"""

from __future__ import annotations

import functools
import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from gguf.quants import dequantize, quantize
from msgspec import Struct
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from tests.quantised_models import gguf_blocks

CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
VOCAB_SIZE = 320
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_OF_TURN = 2
CORPUS = (
    "The weft runs across the warp, over and under, and the cloth grows row by row.",
    "def weave(warp, weft):\n    return [over(t) for t in warp]  # 2024\n",
    "你好，世界。今天天气很好。",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


class Spec(Struct, frozen=True, kw_only=True):
    """A model's geometry. Hidden sizes are multiples of 32, so that every block format can hold the rows."""

    kind: str = "llama"
    hidden: int = 64
    middle: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    attention_bias: bool = False
    tied: bool = False
    sharded: bool = False
    in_gguf: bool = True
    """Whether llama.cpp's converter and Weft both know this kind of model as GGUF."""

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias or self.kind == "qwen2"

    @property
    def gguf_arch(self) -> str:
        return self.kind if self.kind.startswith("qwen") else "llama"


SPECS = {
    "llama2": Spec(layers=3),
    "llama3": Spec(kv_heads=2, rope_theta=500000.0, rope_scaling=LLAMA3_ROPE, sharded=True),
    "llama-linear": Spec(kv_heads=2, rope_scaling={"type": "linear", "factor": 4.0}),
    "llama-bias": Spec(kv_heads=1, attention_bias=True, in_gguf=False),
    "mistral": Spec(kind="mistral", kv_heads=2, head_dim=32, rope_theta=1000000.0),
    "deepseek-llm": Spec(hidden=128, middle=160, layers=3, heads=8, kv_heads=8),
    "qwen2": Spec(kind="qwen2", kv_heads=2, rope_theta=1000000.0),
    "qwen3": Spec(kind="qwen3", kv_heads=2, head_dim=32, rope_theta=1000000.0, tied=True),
    "smollm2": Spec(hidden=96, heads=6, kv_heads=2, rope_theta=100000.0, tied=True),
    "wide": Spec(hidden=256, middle=512, heads=4, kv_heads=2, head_dim=64),
}


def config_json(name: str) -> dict[str, Any]:
    """As models before transformers 5 were published: rope_theta and rope_scaling beside the other fields."""
    spec = SPECS[name]
    config = {
        "architectures": [f"{CLASSES[spec.kind]}ForCausalLM"],
        "model_type": spec.kind,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.middle,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": spec.rope_theta,
        "rope_scaling": spec.rope_scaling,
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tied,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": END_OF_TURN,
    }
    if spec.head_dim != spec.hidden // spec.heads:
        config["head_dim"] = spec.head_dim
    if spec.kind == "llama":
        config["attention_bias"] = spec.attention_bias
    if spec.kind == "mistral":
        config["sliding_window"] = None
    return config


@functools.cache
def state(name: str) -> dict[str, Tensor]:
    """The weights by their Hugging Face names. No norm is one and no bias is zero: each must be used to be right."""
    spec = SPECS[name]
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 * columns**-0.5

    def norm(size: int) -> Tensor:
        return torch.rand(size, generator=generator) + 0.5

    def bias(size: int) -> Tensor:
        return torch.randn(size, generator=generator) * 0.3

    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    weights = {"model.embed_tokens.weight": torch.randn(VOCAB_SIZE, spec.hidden, generator=generator) * 0.1}
    for i in range(spec.layers):
        layer, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        weights[f"{layer}.input_layernorm.weight"] = norm(spec.hidden)
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            weights[f"{attention}.{part}_proj.weight"] = matrix(rows, spec.hidden)
            if spec.qkv_bias:
                weights[f"{attention}.{part}_proj.bias"] = bias(rows)
        weights[f"{attention}.o_proj.weight"] = matrix(spec.hidden, queries)
        if spec.attention_bias:
            weights[f"{attention}.o_proj.bias"] = bias(spec.hidden)
        if spec.kind == "qwen3":
            weights[f"{attention}.q_norm.weight"] = norm(spec.head_dim)
            weights[f"{attention}.k_norm.weight"] = norm(spec.head_dim)
        weights[f"{layer}.post_attention_layernorm.weight"] = norm(spec.hidden)
        weights[f"{layer}.mlp.gate_proj.weight"] = matrix(spec.middle, spec.hidden)
        weights[f"{layer}.mlp.up_proj.weight"] = matrix(spec.middle, spec.hidden)
        weights[f"{layer}.mlp.down_proj.weight"] = matrix(spec.hidden, spec.middle)
    weights["model.norm.weight"] = norm(spec.hidden)
    if not spec.tied:
        weights["lm_head.weight"] = matrix(VOCAB_SIZE, spec.hidden)
    return weights


def quantised_state(name: str, type_name: str) -> dict[str, Tensor]:
    """The weights that a GGUF file of this type holds, by the gguf package's own arithmetic."""
    kind = gguf.GGMLQuantizationType[type_name]
    return {
        tensor_name: tensor
        if tensor.dim() == 1
        else torch.from_numpy(dequantize(quantize(tensor.numpy(), kind), kind).astype(np.float32))
        for tensor_name, tensor in state(name).items()
    }


def save_directory(name: str, folder: Path) -> Path:
    """A Hugging Face directory with a tokenizer and a chat template; in three shards where the spec says so."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = state(name)
    if SPECS[name].sharded:
        shard_of = {tensor: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, tensor in enumerate(weights)}
        for shard in sorted(set(shard_of.values())):
            part = {tensor: weights[tensor] for tensor, held_by in shard_of.items() if held_by == shard}
            save_file(part, folder / shard, metadata={"format": "pt"})
        _put(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": shard_of})
    else:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _put(folder / "config.json", config_json(name))
    _put(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": END_OF_TURN})
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(tokenizer_json())
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    _put(folder / "tokenizer_config.json", settings)


@functools.cache
def tokenizer_json(vocab_size: int = VOCAB_SIZE, corpus: tuple[str, ...] = CORPUS) -> str:
    """A byte-level BPE of so many tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer.to_str()


def save_gguf(
    name: str,
    path: Path,
    type_name: str = "F32",
    sampling: Mapping[str, float] = MappingProxyType({}),
    others: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """The model as one GGUF file: matrices of the type asked for, vectors as F32. `sampling` is further metadata,
    `others` the types of matrices whose names in the file have a part."""
    spec = SPECS[name]
    writer = gguf.GGUFWriter(path, spec.gguf_arch)
    _write_geometry(writer, spec)
    _write_tokenizer(writer)
    for key, value in sampling.items():
        writer.add_int32(key, value) if isinstance(value, int) else writer.add_float32(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[spec.gguf_arch.upper()], spec.layers)
    for tensor_name, tensor in state(name).items():
        data = tensor.numpy()
        if spec.gguf_arch == "llama" and ".q_proj." in tensor_name:
            data = _permuted(data, spec.heads)
        if spec.gguf_arch == "llama" and ".k_proj." in tensor_name:
            data = _permuted(data, spec.kv_heads)
        written = names.get_name(tensor_name, try_suffixes=(".weight", ".bias"))
        if tensor.dim() == 1:
            writer.add_tensor(written, data)
        else:
            found = next((other for part, other in others.items() if part in written), type_name)
            writer.add_tensor(written, gguf_blocks(data, found), raw_dtype=gguf.GGMLQuantizationType[found])
    if spec.rope_scaling == LLAMA3_ROPE:
        writer.add_tensor("rope_freqs.weight", _rope_factors(spec))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_geometry(writer: gguf.GGUFWriter, spec: Spec) -> None:
    writer.add_context_length(512)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.middle)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_vocab_size(VOCAB_SIZE)
    if spec.head_dim != spec.hidden // spec.heads:
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
    if spec.rope_scaling and spec.rope_scaling.get("type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(spec.rope_scaling["factor"])


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    model = json.loads(tokenizer_json())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(END_OF_TURN)
    writer.add_chat_template(CHAT_TEMPLATE)


def _permuted(data: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head with its rotary pairs as neighbours: llama.cpp's LlamaModel.permute."""
    rows = data.shape[0]
    return data.reshape(heads, 2, rows // heads // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)


def _rope_factors(spec: Spec) -> np.ndarray:
    """What llama.cpp's converter makes of the llama3 scaling: a divisor for each frequency."""
    scaling = LLAMA3_ROPE
    trained = scaling["original_max_position_embeddings"]
    long, short = trained / scaling["low_freq_factor"], trained / scaling["high_freq_factor"]
    factors = []
    for i in range(0, spec.head_dim, 2):
        wavelength = 2 * np.pi * spec.rope_theta ** (i / spec.head_dim)
        if wavelength < short:
            factors.append(1.0)
        elif wavelength > long:
            factors.append(scaling["factor"])
        else:
            smooth = (trained / wavelength - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def _put(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1))


def noisy_copy(model: Path, folder: Path) -> Path:
    """A copy of a model with some noise in its weights."""
    copy = shutil.copytree(model, folder / "noisy")
    generator = torch.Generator().manual_seed(0)
    for file in copy.glob("*.safetensors"):
        noisy = {
            name: weight + 0.03 * weight.std() * torch.randn(weight.shape, generator=generator)
            for name, weight in load_file(file).items()
        }
        save_file(noisy, file, metadata={"format": "pt"})
    return copy
