"""The tokenizer that a GGUF file carries in its metadata, with llama.cpp's defaults where a key is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from weft.checkpoint.gguf import GgufFile
from weft.errors import ModelError
from weft.types import TextAssets

T = TypeVar("T")

KINDS = ("gpt2", "llama")
CONTROL = 3
SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""The sampling parameters in a GGUF file's metadata, and what they are called here."""
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endofturn|>", "<|eot|>")
"""Tokens that end an answer where a model's chat template writes them."""


def gguf_text_assets(file: GgufFile) -> TextAssets:
    keys = _Keys(file)
    kind = keys.get("model", str, "")
    if kind not in KINDS:
        raise ModelError(
            f"{file.path}: the tokenizer {kind!r} is not supported; supported: {', '.join(KINDS)}."
            if kind
            else f"{file.path}: there is no tokenizer: tokenizer.ggml.model is missing."
        )
    tokens = keys.get("tokens", list[str], [])
    if not tokens:
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens is missing.")
    scores = keys.per_token("scores", list[float], len(tokens))
    token_types = keys.per_token("token_type", list[int], len(tokens))
    merges = keys.get("merges", list[str], [])
    if kind == "gpt2" and not merges:
        raise ModelError(f"{file.path}: tokenizer.ggml.merges is missing, which a gpt2 tokenizer needs.")
    template = keys.chat_template()
    eos = keys.token("eos_token_id", len(tokens), 2 if kind == "llama" else None)
    ends = [eos, *(keys.token(name, len(tokens), None) for name in ("eot_token_id", "eom_token_id"))]
    return TextAssets(
        kind=kind,
        tokens=tokens,
        scores=scores,
        token_types=token_types,
        merges=merges,
        pre=keys.get("pre", str, ""),
        add_bos=keys.get("add_bos_token", bool, kind == "llama"),
        add_eos=keys.get("add_eos_token", bool, False),
        add_space_prefix=keys.get("add_space_prefix", bool, kind == "llama"),
        bos_token_id=keys.token("bos_token_id", len(tokens), 1 if kind == "llama" else None),
        eos_token_id=eos,
        unk_token_id=keys.token("unknown_token_id", len(tokens), 0 if kind == "llama" else None),
        eos_token_ids=_unique([*ends, *_turn_ends(tokens, token_types, template)]),
        chat_template=template,
        sampling=recommended_sampling(file.metadata, SAMPLING_KEYS),
    )


def recommended_sampling(given: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Return what a model's files recommend, by our names; `keys` are theirs."""
    return {ours: given[theirs] for theirs, ours in keys.items() if given.get(theirs) is not None}


class _Keys:
    """The tokenizer's metadata keys, each checked for its type."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def get(self, name: str, kind: type[T], default: T) -> T:
        return self._typed(f"tokenizer.ggml.{name}", kind, default)

    def chat_template(self) -> str | None:
        return self._typed("tokenizer.chat_template", str, "") or None

    def per_token(self, name: str, kind: type[list[T]], num_tokens: int) -> list[T]:
        values = self.get(name, kind, [])
        if values and len(values) != num_tokens:
            raise ModelError(
                f"{self._file.path}: tokenizer.ggml.{name} has {len(values)} entries for {num_tokens} tokens."
            )
        return values

    def token(self, name: str, num_tokens: int, default: int | None) -> int | None:
        if f"tokenizer.ggml.{name}" not in self._file.metadata:
            return default if default is not None and default < num_tokens else None
        token = self.get(name, int, 0)
        # Some converters write "there is none" as the largest unsigned number.
        if token == 0xFFFFFFFF:
            return None
        if not 0 <= token < num_tokens:
            raise ModelError(f"{self._file.path}: tokenizer.ggml.{name} is {token}, of {num_tokens} tokens.")
        return token

    def _typed(self, key: str, kind: type[T], default: T) -> T:
        if key not in self._file.metadata:
            return default
        try:
            return msgspec.convert(self._file.metadata[key], kind)
        except msgspec.ValidationError as error:
            raise ModelError(f"{self._file.path}: {key} is of the wrong type: {error}.") from error


def _turn_ends(tokens: list[str], token_types: list[int], template: str | None) -> list[int]:
    """Return the ids of the turn-ending control tokens that the chat template writes."""
    written = {text for text in TURN_ENDS if template and text in template}
    return [
        token
        for token, (text, token_type) in enumerate(zip(tokens, token_types, strict=False))
        if token_type == CONTROL and text in written
    ]


def _unique(ids: list[int | None]) -> list[int]:
    return list(dict.fromkeys(token for token in ids if token is not None))
