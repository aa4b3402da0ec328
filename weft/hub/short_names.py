"""Short names for well-known models of the Hugging Face hub: each is one GGUF file of one repository.

The names are those that users of Ollama know. A name stands for the newest commit of its repository on the day when it
is pulled, and stays pinned to that commit.
"""

from __future__ import annotations

from msgspec import Struct


class ShortName(Struct, frozen=True):
    name: str
    hub_id: str
    file: str
    gigabytes: float
    """Size of the file as the hub shows it, in units of 10^9 bytes. It is for the listing: a pull asks the hub."""
    billions: float
    """Parameters, in units of 10^9."""
    alias: str = ""
    """The name without a size, where this is the size that it stands for."""


_QWEN, _HF, _BARTOWSKI = "Qwen", "HuggingFaceTB", "bartowski"


def _quantised(owner: str, model: str, quantisation: str = "Q4_K_M") -> tuple[str, str]:
    """Return the repository and the file of owners that call both by the model's name."""
    return f"{owner}/{model}-GGUF", f"{model}-{quantisation}.gguf"


def _lower_case(owner: str, model: str, quantisation: str = "q4_k_m") -> tuple[str, str]:
    """Return the same of owners whose files have lower-case names."""
    return f"{owner}/{model}-GGUF", f"{model}-{quantisation}.gguf".lower()


TABLE = (
    ShortName("smollm2:360m", *_lower_case(_HF, "SmolLM2-360M-Instruct", "q8_0"), 0.39, 0.36),
    ShortName("smollm2:1.7b", *_lower_case(_HF, "SmolLM2-1.7B-Instruct"), 1.06, 1.71),
    ShortName("llama3.2:1b", *_quantised(_BARTOWSKI, "Llama-3.2-1B-Instruct"), 0.81, 1.24),
    ShortName("llama3.2:3b", *_quantised(_BARTOWSKI, "Llama-3.2-3B-Instruct"), 2.02, 3.21, "llama3.2"),
    ShortName("llama3.1:8b", *_quantised(_BARTOWSKI, "Meta-Llama-3.1-8B-Instruct"), 4.92, 8.03, "llama3.1"),
    ShortName("llama3:8b", *_quantised(_BARTOWSKI, "Meta-Llama-3-8B-Instruct"), 4.92, 8.03, "llama3"),
    ShortName("mistral:7b", *_quantised(_BARTOWSKI, "Mistral-7B-Instruct-v0.3"), 4.37, 7.25, "mistral"),
    ShortName("qwen2.5:0.5b", *_lower_case(_QWEN, "Qwen2.5-0.5B-Instruct"), 0.49, 0.63),
    ShortName("qwen2.5:1.5b", *_lower_case(_QWEN, "Qwen2.5-1.5B-Instruct"), 1.12, 1.78),
    ShortName("qwen2.5:3b", *_lower_case(_QWEN, "Qwen2.5-3B-Instruct"), 2.10, 3.40),
    ShortName("qwen2.5:7b", *_quantised(_BARTOWSKI, "Qwen2.5-7B-Instruct"), 4.68, 7.62, "qwen2.5"),
    ShortName("qwen2.5:14b", *_quantised(_BARTOWSKI, "Qwen2.5-14B-Instruct"), 8.99, 14.8),
    ShortName("qwen2.5-coder:7b", *_quantised(_BARTOWSKI, "Qwen2.5-Coder-7B-Instruct"), 4.68, 7.62, "qwen2.5-coder"),
    ShortName("qwen3:0.6b", *_quantised(_QWEN, "Qwen3-0.6B", "Q8_0"), 0.64, 0.6),
    ShortName("qwen3:1.7b", *_quantised(_QWEN, "Qwen3-1.7B", "Q8_0"), 1.83, 1.72),
    ShortName("qwen3:4b", *_quantised(_QWEN, "Qwen3-4B"), 2.50, 4.02),
    ShortName("qwen3:8b", *_quantised(_QWEN, "Qwen3-8B"), 5.03, 8.19, "qwen3"),
    ShortName("qwen3:14b", *_quantised(_QWEN, "Qwen3-14B"), 9.00, 14.8),
    ShortName("deepseek-r1:1.5b", *_quantised(_BARTOWSKI, "DeepSeek-R1-Distill-Qwen-1.5B"), 1.12, 1.78),
    ShortName("deepseek-r1:7b", *_quantised(_BARTOWSKI, "DeepSeek-R1-Distill-Qwen-7B"), 4.68, 7.62, "deepseek-r1"),
)

SHORT_NAMES: dict[str, ShortName] = {
    **{model.name: model for model in TABLE},
    **{name: model for model in TABLE if model.alias for name in (model.alias, f"{model.alias}:latest")},
}
"""Models by every name that they have."""


def short_name_of(hub_id: str, file: str) -> str:
    """Return the short name of a file of the hub; empty where it has none."""
    return next((model.name for model in TABLE if (model.hub_id, model.file) == (hub_id, file)), "")
