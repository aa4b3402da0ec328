"""What the text room and the model room need of a model, whichever kind its files are."""

from __future__ import annotations

from typing import Any

from weft.hub.files import ModelFiles
from weft.hub.gguf import GgufFile, read_gguf
from weft.hub.gguf_text import gguf_text_assets
from weft.hub.jsonfile import read_object
from weft.hub.tokenizer_files import directory_text_assets
from weft.types import TextAssets


def text_assets(files: ModelFiles) -> TextAssets:
    """The tokenizer and the chat template."""
    if files.kind == "gguf":
        return gguf_text_assets(read_gguf(files.path))
    if files.kind == "dummy":
        return _numbered_words(int(model_facts(files)["vocab_size"]))
    return directory_text_assets(files.path)


def model_facts(files: ModelFiles) -> dict[str, Any]:
    """The model's own description: config.json as it stands, or a GGUF file's metadata without the vocabulary."""
    if files.kind == "gguf":
        return gguf_facts(read_gguf(files.path))
    return read_object(files.path / "config.json")


def _numbered_words(vocab_size: int) -> TextAssets:
    """A vocabulary for a model that has none: each token is written as its number."""
    return TextAssets(kind="gpt2", tokens=[f"Ġ{i}" for i in range(vocab_size)], token_types=[1] * vocab_size)


def gguf_facts(file: GgufFile) -> dict[str, Any]:
    return {
        key: value
        for key, value in file.metadata.items()
        if not (key.startswith("tokenizer.") and (isinstance(value, list) or key.startswith("tokenizer.chat_template")))
    }
