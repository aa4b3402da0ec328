"""The tokenizer and chat template of a Hugging Face directory: JSON and Jinja text, never code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.checkpoint.gguf import GgufFile, read_gguf
from weft.checkpoint.gguf_tokenizer import gguf_text_assets, recommended_sampling
from weft.checkpoint.json_file import parse_object, read_object, read_object_if_there, read_text
from weft.checkpoint.model_files import ModelFiles
from weft.errors import ModelError
from weft.types import TextAssets

GENERATION_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""The sampling parameters in a generation_config.json, and what they are called here."""


def directory_text_assets(folder: Path) -> TextAssets:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder}: tokenizer.json is missing.",
            hint="Weft reads the tokenizers library's JSON; save the tokenizer in that form beside the weights.",
        )
    tokenizer_json = read_text(path)
    tokenizer = parse_object(tokenizer_json, path)
    settings = read_object_if_there(folder / "tokenizer_config.json")
    names = {**read_object_if_there(folder / "special_tokens_map.json"), **settings}
    ids = _token_ids(tokenizer)
    bos, eos, unk = (ids.get(_text(names.get(f"{role}_token"))) for role in ("bos", "eos", "unk"))
    generation = read_object_if_there(folder / "generation_config.json")
    ends = [
        *([eos] if eos is not None else []),
        *_configured_ends(read_object_if_there(folder / "config.json")),
        *_configured_ends(generation),
    ]
    return TextAssets(
        kind="json",
        tokenizer_json=tokenizer_json,
        add_bos=_adds(settings.get("add_bos_token"), tokenizer, bos),
        add_eos=_adds(settings.get("add_eos_token"), tokenizer, eos),
        bos_token_id=bos,
        eos_token_id=eos if eos is not None or not ends else ends[0],
        unk_token_id=unk,
        eos_token_ids=list(dict.fromkeys(ends)),
        chat_template=_chat_template(folder, settings),
        sampling=recommended_sampling(generation, GENERATION_KEYS),
    )


def _token_ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return every token's id: those of the vocabulary, and the added ones over them."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, int] = {}
    if isinstance(vocabulary, dict):
        ids |= {token: number for token, number in vocabulary.items() if isinstance(number, int)}
    elif isinstance(vocabulary, list):
        # A unigram model lists [token, score] pairs in the order of their ids.
        for number, pair in enumerate(vocabulary):
            match pair:
                case [str(token), *_]:
                    ids[token] = number
    added = tokenizer.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        match entry:
            case {"content": str(token), "id": int(number)}:
                ids[token] = number
    return ids


def _text(token: Any) -> str:
    """Return the text of a special token, which is a string or an object that holds one."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _configured_ends(config: dict[str, Any]) -> list[int]:
    ends = config.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [ends]
    return [token for token in listed if type(token) is int and token >= 0]


def _adds(setting: Any, tokenizer: dict[str, Any], token: int | None) -> bool:
    """Return whether the tokenizer puts the token around a text: what its settings say, else what its template does."""
    if isinstance(setting, bool):
        return setting and token is not None
    return token is not None and token in _template_ids(tokenizer.get("post_processor"))


def _template_ids(processor: Any) -> set[int]:
    """Return the ids that a post-processor adds to a single text."""
    match processor:
        case {"type": "Sequence", "processors": list(parts)}:
            return {token for part in parts for token in _template_ids(part)}
        case {"type": "TemplateProcessing", "single": list(single), "special_tokens": dict(special)}:
            return {token for piece in single for token in _piece_ids(piece, special)}
    return set()


def _piece_ids(piece: Any, special: dict[str, Any]) -> list[int]:
    match piece:
        case {"SpecialToken": {"id": str(name)}}:
            match special.get(name):
                case {"ids": list(ids)}:
                    return [token for token in ids if isinstance(token, int)]
    return []


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """Return the template file where there is one, else the settings' only or default template."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    template = settings.get("chat_template") or read_object_if_there(folder / "chat_template.json").get("chat_template")
    for entry in template if isinstance(template, list) else []:
        match entry:
            case {"name": "default", "template": str(text)}:
                return text
    return template if isinstance(template, str) and template else None


def text_assets(files: ModelFiles) -> TextAssets:
    """Read the tokenizer and the chat template."""
    if files.kind == "gguf":
        return gguf_text_assets(read_gguf(files.path))
    if files.kind == "dummy":
        return _numbered_words(int(model_facts(files)["vocab_size"]))
    return directory_text_assets(files.path)


def model_facts(files: ModelFiles) -> dict[str, Any]:
    """Read the model's own description: config.json as it stands, or a GGUF file's metadata without the vocabulary."""
    if files.kind == "gguf":
        return gguf_facts(read_gguf(files.path))
    return read_object(files.path / "config.json")


def _numbered_words(vocab_size: int) -> TextAssets:
    """Make a vocabulary for a model that has none: each token is written as its number."""
    return TextAssets(kind="gpt2", tokens=[f"Ġ{i}" for i in range(vocab_size)], token_types=[1] * vocab_size)


def gguf_facts(file: GgufFile) -> dict[str, Any]:
    return {
        key: value
        for key, value in file.metadata.items()
        if not (key.startswith("tokenizer.") and (isinstance(value, list) or key.startswith("tokenizer.chat_template")))
    }
