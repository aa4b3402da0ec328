"""transformers, as the judge of parity. It takes seconds to import: only the parity tests import this module."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from weft.checkpoint.gguf import map_tensors, read_gguf

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def from_directory(folder: Path) -> Any:
    """The model of a directory; a tensor that is missing, or that transformers does not know, is a failure."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


def from_state(config: Any, state: dict[str, Tensor]) -> Any:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    # Made anew, since the buffers of a model on the meta device hold nothing.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    return model.eval()


def from_llama_gguf(path: Path) -> Any:
    """A Llama with the weights of a GGUF file, exactly as the gguf package dequantises them. The header is read by
    Weft: the package's own reader takes seconds for a large vocabulary."""
    file = read_gguf(path)
    raw = map_tensors(file)
    facts: dict[str, Any] = {key.removeprefix("llama."): value for key, value in file.metadata.items()}
    heads, kv_heads = facts["attention.head_count"], facts["attention.head_count_kv"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, facts["block_count"])
    config = transformers.LlamaConfig(
        hidden_size=facts["embedding_length"],
        intermediate_size=facts["feed_forward_length"],
        num_hidden_layers=facts["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=facts["vocab_size"],
        max_position_embeddings=facts["context_length"],
        rms_norm_eps=facts["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": facts["rope.freq_base"]},
        tie_word_embeddings="output.weight" not in raw,
    )
    with torch.device("meta"):
        wanted = transformers.LlamaForCausalLM(config).state_dict()
    state = {}
    for name in wanted:
        written = names.get_name(name, try_suffixes=(".weight",))
        if written == "output.weight" and config.tie_word_embeddings:
            continue
        tensor = file.tensors[written]
        rows = raw.pop(written).reshape(*tensor.shape[:-1], -1)
        data = torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.type.name]).copy())
        for part, part_heads in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:
                # Rotary pairs are neighbours in the file; transformers has them half a head apart.
                data = data.unflatten(0, (part_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        state[name] = data.contiguous()
    assert not raw, f"not understood: {sorted(raw)}"
    return from_state(config, state)


@torch.inference_mode()
def logits(model: Any, token_ids: list[int]) -> Tensor:
    """[tokens, vocabulary]: row i is what the model gives after token i."""
    return model(torch.tensor([token_ids])).logits[0]


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """The likeliest token after the other, over transformers' own cache. generate() would end at an end token."""
    cache, tokens = None, list(prompt)
    for _ in range(num_tokens):
        new = tokens if cache is None else tokens[-1:]
        output = model(torch.tensor([new]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        tokens.append(int(output.logits[0, -1].argmax()))
    return tokens[len(prompt) :]
