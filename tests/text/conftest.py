"""Two tiny vocabularies, small enough to read: one over bytes, one with SentencePiece's spelling."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from weft.text.tokenizer import Tokenizer
from weft.types import TextAssets

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's the fox's 2nd jump, in 2024!",
    "def weave(warp, weft):\n    return [over(t) for t in warp]  # under\n",
    "你好，世界。今天天气很好。",
    "Emoji 🎉🎉 and 👩‍👩‍👧 family, café, naïve",
]


@pytest.fixture(scope="session")
def trained_bpe() -> tokenizers.Tokenizer:
    """Return a byte-level BPE as the tokenizers library trains and keeps it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def json_assets(trained_bpe: tokenizers.Tokenizer) -> TextAssets:
    return TextAssets(kind="json", tokenizer_json=trained_bpe.to_str(), bos_token_id=1, eos_token_id=0)


@pytest.fixture(scope="session")
def gpt2_assets(trained_bpe: tokenizers.Tokenizer) -> TextAssets:
    """Return the trained vocabulary, as a GGUF file would hold it."""
    model = json.loads(trained_bpe.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return TextAssets(
        kind="gpt2",
        tokens=tokens,
        merges=[" ".join(merge) for merge in model["merges"]],
        token_types=[3, 3] + [1] * (len(tokens) - 2),
        pre="gpt-2",
        bos_token_id=1,
        eos_token_id=0,
    )


_CONTROL = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<tool>", 0.0, 4)]
_BYTES = [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
_MADE = ["▁t", "he", "▁the", "in", "er", "▁a", "nd", "▁and", "▁▁", "▁▁▁▁", "ee", "the", "ing", "你好", "▁w", "▁we"]
_SINGLE = "▁abcdefghijklmnopqrstuvwxyzABCT.,!你好世界é"


@pytest.fixture(scope="session")
def llama_assets() -> TextAssets:
    made = [(piece, -float(rank), 1) for rank, piece in enumerate(_MADE)]
    single = [(piece, -float(len(_MADE) + rank), 1) for rank, piece in enumerate(_SINGLE)]
    entries = _CONTROL + _BYTES + made + single
    return TextAssets(
        kind="llama",
        tokens=[token for token, _, _ in entries],
        scores=[score for _, score, _ in entries],
        token_types=[kind for _, _, kind in entries],
        add_bos=True,
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
    )


@pytest.fixture(scope="session")
def byte_level(gpt2_assets: TextAssets) -> Tokenizer:
    return Tokenizer.from_assets(gpt2_assets)


@pytest.fixture(scope="session")
def sentencepiece(llama_assets: TextAssets) -> Tokenizer:
    return Tokenizer.from_assets(llama_assets)
