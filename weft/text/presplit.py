"""How a byte-level BPE cuts text into words before it merges, by the name a GGUF file gives the cut."""

from __future__ import annotations

from msgspec import Struct
from tokenizers import Regex, normalizers, pre_tokenizers

from weft.errors import ModelError

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
    """Each pattern's matches become words of their own, in this order."""
    single_digits: bool = False
    gpt2_words: bool = False
    """After the patterns, split once more by GPT-2's own pattern."""
    nfc: bool = False
    whole_words_first: bool = False
    """A word that is itself in the vocabulary is taken whole, without asking the merges."""

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
    """The pre-tokenizer of that name, or a ModelError that lists the names there are."""
    found = PRE_SPLITS.get(name)
    if found is None:
        known = ", ".join(sorted(name for name in PRE_SPLITS if name))
        raise ModelError(
            f"The model's vocabulary asks for the pre-tokenizer {name!r}, which Weft does not have; it has: {known}.",
            hint="Use the model's Hugging Face directory, whose tokenizer.json describes its own pre-tokenizer.",
        )
    return found
