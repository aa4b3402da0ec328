"""Writes a checkpoint of random numbers for the config.json of a folder, as safetensors in four shards:
`python3 -m tests.gpu.random_checkpoint DIR`. How long a start takes with real files is measured with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

SHARDS = 4


def shapes(facts: dict[str, int]) -> dict[str, tuple[int, ...]]:
    hidden, middle, vocabulary = facts["hidden_size"], facts["intermediate_size"], facts["vocab_size"]
    head_dim = hidden // facts["num_attention_heads"]
    keys = facts["num_key_value_heads"] * head_dim
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(facts["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.self_attn.q_proj.weight": (hidden, hidden),
            f"{at}.self_attn.k_proj.weight": (keys, hidden),
            f"{at}.self_attn.v_proj.weight": (keys, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, hidden),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.mlp.gate_proj.weight": (middle, hidden),
            f"{at}.mlp.up_proj.weight": (middle, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, middle),
        }
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def main(folder: Path) -> None:
    named = list(shapes(json.loads((folder / "config.json").read_text())).items())
    total = 0
    for shard in range(SHARDS):
        own = named[shard * len(named) // SHARDS : (shard + 1) * len(named) // SHARDS]
        tensors = {name: (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02).cpu() for name, shape in own}
        save_file(tensors, folder / f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors")
        total += sum(tensor.nbytes for tensor in tensors.values())
    print(f"{total / 1e9:.2f} GB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
