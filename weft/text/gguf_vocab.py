"""Builds a tokenizer from a bare vocabulary: the tokens, scores and merges that a GGUF file holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

import tokenizers
from msgspec import Struct
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from weft.errors import ModelError
from weft.types import TextAssets

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# DeepSeek spells this class out, range by range; it is the cased letters, less the scripts named here.
_DEEPSEEK_LETTER = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10C7-\u10FF\u1C80-\u1C8A\u2D00-\u2D2D\uA790-\uA7FA\uAB30-\uAB68"
    r"\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF2A}]]"
)
_DEEPSEEK_CJK = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?{_DEEPSEEK_LETTER}+",
    r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+",
    # The published pattern is \s+$, which takes quadratic time on a run of spaces inside the text: a match can only
    # begin where the run does, and saying so makes it linear without changing what matches.
    r"(?<!\s)\s+$",
    _DEEPSEEK_CJK,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK)


class PreSplit(Struct, frozen=True, kw_only=True):
    """The steps between a text and the words that BPE merges are applied to."""

    patterns: tuple[str, ...] = ()
    """Patterns whose matches become words of their own, in this order."""
    single_digits: bool = False
    gpt2_words: bool = False
    """True when the words are split once more, by GPT-2's own pattern, after the patterns."""
    nfc: bool = False
    whole_words_first: bool = False
    """True when a word that is itself in the vocabulary is taken whole, without the merges."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2_words))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_GPT2 = PreSplit(gpt2_words=True)
_SMOLLM = PreSplit(single_digits=True, gpt2_words=True)
_LLAMA_BPE = PreSplit(patterns=(_LLAMA3,), whole_words_first=True)
_QWEN = PreSplit(patterns=(_QWEN2,), nfc=True)

PRE_SPLITS: dict[str, PreSplit] = {
    "": _GPT2,
    "default": _GPT2,
    "gpt2": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama-bpe": _LLAMA_BPE,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "deepseek-llm": PreSplit(patterns=_DEEPSEEK_LLM, single_digits=True),
    "deepseek-coder": PreSplit(patterns=_DEEPSEEK_CODER, single_digits=True),
}


def pre_split(name: str) -> PreSplit:
    """Return the pre-tokenizer of that name. Raises ModelError that lists the known names."""
    found = PRE_SPLITS.get(name)
    if found is None:
        known = ", ".join(sorted(name for name in PRE_SPLITS if name))
        raise ModelError(
            f"The model's vocabulary asks for the pre-tokenizer {name!r}, which Weft does not have; it has: {known}.",
            hint="Use the model's Hugging Face directory, whose tokenizer.json describes its own pre-tokenizer.",
        )
    return found


Merge = tuple[str, str]

SPACE_MARK = "▁"


class TokenType(IntEnum):
    """The token types as GGUF numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def byte_level(assets: TextAssets) -> tokenizers.Tokenizer:
    """Build a tokenizer of kind gpt2: BPE over bytes, with the merges of the file."""
    split = pre_split(assets.pre)
    vocab = _vocab(assets)
    built = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=_read_merges(assets.merges, vocab), ignore_merges=split.whole_words_first)
    )
    built.pre_tokenizer = split.pre_tokenizer()
    normalizer = split.normalizer()
    if normalizer is not None:
        built.normalizer = normalizer
    built.decoder = decoders.ByteLevel()
    return _with_added_tokens(built, assets)


def sentencepiece(assets: TextAssets) -> tokenizers.Tokenizer:
    """Build a tokenizer of kind llama: BPE over characters with a fallback to bytes, merges implied by the scores."""
    vocab = _vocab(assets)
    merges = _read_merges(assets.merges, vocab) if assets.merges else _merges_from_scores(assets, vocab)
    unknown = None if assets.unk_token_id is None else assets.tokens[assets.unk_token_id]
    built = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, unk_token=unknown)
    )
    built.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE_MARK, prepend_scheme="first" if assets.add_space_prefix else "never", split=False
    )
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if assets.add_space_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    built.decoder = decoders.Sequence(steps)
    return _with_added_tokens(built, assets)


BUILDERS: dict[str, Callable[[TextAssets], tokenizers.Tokenizer]] = {"gpt2": byte_level, "llama": sentencepiece}


def _vocab(assets: TextAssets) -> dict[str, int]:
    if not assets.tokens:
        raise ModelError("The model's vocabulary is empty.")
    if assets.token_types and len(assets.token_types) != len(assets.tokens):
        raise ModelError(
            f"The model's vocabulary is damaged: {len(assets.tokens)} tokens, {len(assets.token_types)} token types."
        )
    named = {"bos": assets.bos_token_id, "eos": assets.eos_token_id, "unk": assets.unk_token_id}
    for name, token_id in named.items():
        if token_id is not None and not 0 <= token_id < len(assets.tokens):
            raise ModelError(
                f"The model's vocabulary is damaged: the {name} token is {token_id}, of {len(assets.tokens)} tokens."
            )
    return {token: token_id for token_id, token in enumerate(assets.tokens)}


def _read_merges(lines: Sequence[str], vocab: dict[str, int]) -> list[Merge]:
    # Checked here because the tokenizers library panics, rather than raises, on some merges it cannot resolve.
    merges: list[Merge] = []
    for line in lines:
        left, _, right = line.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(f"The model's vocabulary is damaged: the merge {line!r} is not made of its tokens.")
        merges.append((left, right))
    return merges


def _merges_from_scores(assets: TextAssets, vocab: dict[str, int]) -> list[Merge]:
    """Return every way to make a token of two others, the best-scored token first.

    SentencePiece always makes the best-scored token it can; for a token made in several ways, the order here (long
    left part, then long right part, then the parts' ids) is the one that published conversions agree on.
    """
    if len(assets.scores) != len(assets.tokens):
        raise ModelError(
            f"The model's vocabulary is damaged: {len(assets.tokens)} tokens, {len(assets.scores)} scores."
        )
    types = assets.token_types or [TokenType.NORMAL] * len(assets.tokens)
    ranked: list[tuple[float, int, int, Merge]] = []
    for token, score, token_type in zip(assets.tokens, assets.scores, types, strict=True):
        if token_type not in (TokenType.NORMAL, TokenType.USER_DEFINED):
            continue
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges = [merge for merge in cuts if merge[0] in vocab and merge[1] in vocab]
        merges.sort(key=lambda merge: (vocab[merge[0]], vocab[merge[1]]))
        ranked.extend((score, len(left), len(right), (left, right)) for left, right in merges)
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    return [merge for *_, merge in ranked]


def _with_added_tokens(built: tokenizers.Tokenizer, assets: TextAssets) -> tokenizers.Tokenizer:
    """Add control tokens, which match whole and are not shown, and user-defined ones, which are shown."""
    special = {assets.bos_token_id, assets.eos_token_id}
    plain = set()
    for token_id, token_type in enumerate(assets.token_types):
        if token_type in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.add(token_id)
        elif token_type == TokenType.USER_DEFINED:
            plain.add(token_id)
    shown_ids = sorted(plain - special)
    special_ids = sorted(token_id for token_id in special if token_id is not None)
    built.add_special_tokens(list(_added(assets, special_ids, special=True)))
    built.add_tokens(list(_added(assets, shown_ids, special=False)))
    return built


def _added(assets: TextAssets, ids: Iterable[int], *, special: bool) -> Iterable[AddedToken]:
    for token_id in ids:
        if assets.tokens[token_id]:
            yield AddedToken(assets.tokens[token_id], normalized=False, special=special)
