"""An adapter that is loaded while the server runs: python lora.py [DIRECTORY].

The server needs an admin key and a folder from which adapters may be loaded:

    WEFT_ADMIN_KEY=boss weft serve --adapter-root /tmp

Without a directory an adapter of random numbers is made in /tmp: it changes answers, and improves none.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import save_file

url = os.environ.get("SERVER_URL", "http://127.0.0.1:8000")
key = os.environ.get("SERVER_KEY", "none")
admin = {"authorization": f"Bearer {os.environ.get('SERVER_ADMIN_KEY', 'boss')}"}


def random_adapter(folder: Path, rank: int = 4, layers: int = 30, width: int = 576) -> Path:
    """Write an adapter for SmolLM2-135M to a directory, as PEFT writes them."""
    numbers = np.random.default_rng(1)
    tensors = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = numbers.normal(0, width**-0.5, (rank, width)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = numbers.normal(0, 0.3, (width, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def ask(model: str) -> str:
    body = {"model": model, "prompt": "The sea is", "temperature": 0, "max_tokens": 16}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=600)
    return answer.raise_for_status().json()["choices"][0]["text"]


with tempfile.TemporaryDirectory() as made:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else random_adapter(Path(made))
    body = {"lora_name": "example", "lora_path": str(folder)}
    httpx.post(f"{url}/admin/lora/load", json=body, headers=admin, timeout=600).raise_for_status()
    try:
        print("without:", ask("smollm2"))
        print("with:   ", ask("example"))
    finally:
        httpx.post(f"{url}/admin/lora/unload", json={"lora_name": "example"}, headers=admin, timeout=600)
