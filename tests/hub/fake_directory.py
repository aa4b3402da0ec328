"""A small Hugging Face directory: two shards with an index, a tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

TOKENIZER: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    "added_tokens": [{"id": 2, "content": "<s>"}, {"id": 3, "content": "</s>"}, {"id": 4, "content": "<unk>"}],
    "post_processor": {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel"},
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}},
            },
        ],
    },
}
SETTINGS: dict[str, Any] = {
    "bos_token": {"content": "<s>"},
    "eos_token": "</s>",
    "unk_token": None,
    "chat_template": "{{ settings }}",
}
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}


def put(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def make_directory(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    put(folder, "config.json", {"architectures": ["LlamaForCausalLM"], "eos_token_id": 3})
    put(folder, "generation_config.json", {"eos_token_id": [3, 1]})
    put(folder, "tokenizer.json", TOKENIZER)
    put(folder, "tokenizer_config.json", SETTINGS)
    put(folder, "model.safetensors.index.json", INDEX)
    for tensor, name in INDEX["weight_map"].items():
        save_file({tensor: np.ones((2, 3), dtype=np.float32)}, folder / name)
    return folder
