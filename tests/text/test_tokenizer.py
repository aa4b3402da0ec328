from __future__ import annotations

import itertools
import json

import msgspec
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from tests.growth import check_linear
from tests.tiny_models import tokenizer_json
from weft.errors import ContextTooLong, InvalidRequest, ModelError
from weft.text import tokenizer as tokenizer_module
from weft.text.gguf_vocab import PRE_SPLITS
from weft.text.tokenizer import Tokenizer, num_chars
from weft.types import TextAssets

TEXTS = [
    "",
    " ",
    "The fox's 2nd jump",
    "  two  spaces\n\n\tand tabs  ",
    "你好，世界",
    "🎉 café 👩‍👩‍👧",
    "<|start|>the dog<|end|>",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_byte_level_vocabulary_encodes_as_the_tokenizer_it_was_taken_from(
    byte_level: Tokenizer, trained_bpe: tokenizers.Tokenizer, text: str
) -> None:
    ids = byte_level.encode(text)
    assert ids == trained_bpe.encode(text).ids
    assert byte_level.decode(ids, skip_special_tokens=False) == text


def test_a_tokenizer_json_encodes_as_the_library_does(
    json_assets: TextAssets, trained_bpe: tokenizers.Tokenizer
) -> None:
    tokenizer = Tokenizer.from_assets(json_assets)
    assert [tokenizer.encode(text) for text in TEXTS] == [trained_bpe.encode(text).ids for text in TEXTS]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_ids) == ("<|start|>", "<|end|>", (0,))
    assert tokenizer.vocab_size == trained_bpe.get_vocab_size()
    assert tokenizer.special_ids == {0, 1}


def test_padding_and_truncation_in_a_tokenizer_json_are_ignored(trained_bpe: tokenizers.Tokenizer) -> None:
    cut = tokenizers.Tokenizer.from_str(trained_bpe.to_str())
    cut.enable_truncation(2)
    cut.enable_padding(length=64)
    tokenizer = Tokenizer.from_assets(TextAssets(kind="json", tokenizer_json=cut.to_str()))
    assert tokenizer.encode(TEXTS[2]) == trained_bpe.encode(TEXTS[2]).ids


def test_bos_is_added_once_whether_the_file_or_the_assets_ask_for_it(trained_bpe: tokenizers.Tokenizer) -> None:
    framed = tokenizers.Tokenizer.from_str(trained_bpe.to_str())
    framed.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 1)])
    for source in (framed, trained_bpe):
        assets = TextAssets(kind="json", tokenizer_json=source.to_str(), add_bos=True, bos_token_id=1)
        tokenizer = Tokenizer.from_assets(assets)
        assert tokenizer.encode("fox") == [1, *trained_bpe.encode("fox").ids]
        assert tokenizer.encode("fox", add_special_tokens=False) == trained_bpe.encode("fox").ids


def test_eos_is_added_when_the_assets_ask(gpt2_assets: TextAssets) -> None:
    tokenizer = Tokenizer.from_assets(msgspec.structs.replace(gpt2_assets, add_eos=True))
    assert tokenizer.encode("fox")[-1] == 0


def test_user_defined_tokens_match_whole_and_are_shown(gpt2_assets: TextAssets) -> None:
    assets = msgspec.structs.replace(
        gpt2_assets, tokens=[*gpt2_assets.tokens, "<think> ｜"], token_types=[*gpt2_assets.token_types, 4]
    )
    tokenizer = Tokenizer.from_assets(assets)
    added = len(gpt2_assets.tokens)
    ids = tokenizer.encode("a<think> ｜b")
    assert ids[1] == added
    assert tokenizer.decode(ids) == "a<think> ｜b"
    assert tokenizer.token_text(added) == "<think> ｜"
    assert added not in tokenizer.special_ids


def _split(name: str, text: str) -> list[str]:
    return [text[start:end] for _, (start, end) in PRE_SPLITS[name].pre_tokenizer().pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "it's 2024  x", ["it", "'s", " 2024", " ", " x"]),
        ("default", "IT'S", ["IT", "'", "S"]),
        ("smollm", "in 2024  x", ["in", " ", "2", "0", "2", "4", " ", " x"]),
        ("llama-bpe", "IT'S 20245\n\n x", ["IT", "'S", " ", "202", "45", "\n\n", " x"]),
        ("qwen2", "IT'S 2024\n\n x", ["IT", "'S", " ", "2", "0", "2", "4", "\n\n", " x"]),
        ("deepseek-llm", "a b12，你好 \n  x", ["a", " b", "1", "2", "，", "你好", " ", "\n", " ", " x"]),
        ("deepseek-coder", "a.b 你好12", ["a", ".", "b", " ", "你好", "1", "2"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_model_was_trained_with(name: str, text: str, words: list[str]) -> None:
    assert _split(name, text) == words


@pytest.mark.parametrize("name", sorted(PRE_SPLITS))
def test_long_runs_of_spaces_take_linear_time(name: str) -> None:
    def split(text: str) -> None:
        assert "".join(_split(name, text)) == text

    check_linear(lambda n: "".join(" " * n + end for end in "x1你"), split, 2_000)


def test_llama3_takes_a_word_of_the_vocabulary_whole(gpt2_assets: TextAssets) -> None:
    assets = msgspec.structs.replace(
        gpt2_assets, tokens=[*gpt2_assets.tokens, "zzzz"], token_types=[*gpt2_assets.token_types, 1], pre="llama-bpe"
    )
    assert Tokenizer.from_assets(assets).encode("zzzz") == [len(gpt2_assets.tokens)]


def test_qwen2_composes_accents(gpt2_assets: TextAssets) -> None:
    tokenizer = Tokenizer.from_assets(msgspec.structs.replace(gpt2_assets, pre="qwen2"))
    assert tokenizer.decode(tokenizer.encode("cafe\u0301")) == "café"


def _sentencepiece_by_hand(assets: TextAssets, text: str) -> list[int]:
    """Join the best-scored neighbours until none can be joined, leftmost first; then bytes for what is unknown."""
    ids = {token: token_id for token_id, token in enumerate(assets.tokens)}
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    if text.startswith(" "):
        pieces = pieces[1:]
    while True:
        best = max(
            (
                (assets.scores[ids[a + b]], -at)
                for at, (a, b) in enumerate(itertools.pairwise(pieces))
                if a in ids and b in ids and a + b in ids
            ),
            default=None,
        )
        if best is None:
            break
        at = -best[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    result = []
    for piece in pieces:
        result += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return result


@settings(max_examples=200)
@given(text=st.text(alphabet="thewandrig .你好世🎉é ", max_size=24))
def test_a_sentencepiece_vocabulary_joins_the_best_scored_pieces(
    sentencepiece: Tokenizer, llama_assets: TextAssets, text: str
) -> None:
    ids = sentencepiece.encode(text)
    assert ids == [1, *_sentencepiece_by_hand(llama_assets, text)]


def test_a_sentencepiece_vocabulary_equals_transformers_llama_tokenizer(
    sentencepiece: Tokenizer, llama_assets: TextAssets
) -> None:
    transformers = pytest.importorskip("transformers")
    base = pytest.importorskip("transformers.tokenization_utils_base")
    vocab = {token: token_id for token_id, token in enumerate(llama_assets.tokens)}
    merges = base.generate_merges(vocab, dict(zip(llama_assets.tokens, llama_assets.scores, strict=True)))
    theirs = transformers.LlamaTokenizer(vocab=vocab, merges=merges)
    for text in ["the band and the  weather", "  you", "你好世界🎉", "a\n\tb", "</s>the<s> and", "é<tool>"]:
        ids = sentencepiece.encode(text, add_special_tokens=False)
        if "<tool>" not in text:
            assert ids == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert sentencepiece.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_without_add_space_prefix_no_space_is_put_before_the_text(llama_assets: TextAssets) -> None:
    tokenizer = Tokenizer.from_assets(msgspec.structs.replace(llama_assets, add_space_prefix=False, add_bos=False))
    assert tokenizer.encode("the") == [llama_assets.tokens.index("the")]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_token_bytes_and_text_for_log_probabilities(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer in (byte_level, sentencepiece):
        ids = tokenizer.encode(" the 🎉", add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == " the 🎉"
    assert byte_level.token_text(byte_level.encode("龍")[0]) == "\ufffd"
    assert byte_level.token_text(0) == "<|end|>"
    assert byte_level.token_bytes(10**9) == byte_level.token_bytes(-1) == b""


def test_half_a_character_is_refused_with_its_position(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="position 2"):
        byte_level.encode("ab\ud83dc")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "wordpiece"}, "'wordpiece'; Weft has: json, gpt2, llama"),
        ({"pre": "martian"}, "'martian'.*it has: .*llama-bpe.*qwen2.*smollm"),
        ({"tokens": []}, "empty"),
        ({"token_types": [1, 1]}, "2 token types"),
        ({"merges": ["a zebra"]}, "'a zebra'"),
        ({"merges": ["ab"]}, "'ab'"),
        ({"eos_token_id": 4000}, "eos token is 4000"),
        ({"bos_token_id": None, "add_bos": True}, "bos token around every text"),
        ({"kind": "llama", "merges": [], "scores": [0.0]}, "1 scores"),
        ({"kind": "json", "tokenizer_json": "{"}, "tokenizer.json cannot be read"),
        ({"kind": "json", "tokenizer_json": "{}"}, "tokenizer.json cannot be read"),
    ],
)
def test_damaged_assets_are_a_model_error_that_names_the_damage(
    gpt2_assets: TextAssets, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_assets(msgspec.structs.replace(gpt2_assets, **change))


def test_a_decoder_that_needs_neighbouring_tokens_is_refused(trained_bpe: tokenizers.Tokenizer) -> None:
    source = json.loads(trained_bpe.to_str())
    source["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer.from_assets(TextAssets(kind="json", tokenizer_json=json.dumps(source)))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that is given to the library."""
    texts: list[str] = []
    ids = Tokenizer._ids

    def counting(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        texts.append(text)
        return ids(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "_ids", counting)
    return texts


def test_a_text_is_refused_by_its_length_before_any_of_it_is_encoded(byte_level: Tokenizer, encoded: list[str]) -> None:
    most = 100 * byte_level.longest_token
    byte_level.encode(" " * most, max_tokens=100_000)
    encoded.clear()
    with pytest.raises(ContextTooLong, match=f"{most + 1} characters has more than 100 tokens") as refused:
        byte_level.encode("x" * (most + 1), max_tokens=100)
    assert "--max-model-len" in refused.value.hint
    assert not encoded


def test_a_text_with_more_tokens_is_refused_when_so_many_are_counted(
    byte_level: Tokenizer, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARS", 64)
    with pytest.raises(ContextTooLong, match="more than 500 tokens"):
        byte_level.encode("龍" * 500, max_tokens=500)
    assert sum(map(len, encoded)) < 500, "the rest was never looked at"


def test_a_text_within_the_bound_is_encoded_as_ever(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARS", 64)
    text = "The fox's 2nd jump over 你好 <|start|>the dog<|end|> " * 50
    whole = byte_level.encode(text)
    assert byte_level.encode(text, max_tokens=2 * len(whole)) == whole


def test_the_longest_token_is_counted_in_bytes(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer in (byte_level, sentencepiece):
        every = [len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size)]
        assert tokenizer.longest_token == max(every)


@pytest.mark.parametrize(
    ("value", "chars"),
    [("abc", 3), (["ab", 1, None], 2 + 2 + 1 + 3), ({"ab": ["c"]}, 1 + 1 + 2 + 1 + 1 + 1), ((), 1), ({}, 1)],
)
def test_the_characters_of_a_nested_value(value: object, chars: int) -> None:
    assert num_chars(value, 1000) == chars
    assert num_chars([value] * 10**6, 1000) > 1000


def test_the_tokens_around_a_gap_are_those_that_the_vocabulary_has() -> None:
    inner = tokenizers.Tokenizer.from_str(tokenizer_json())
    plain = Tokenizer.from_assets(TextAssets(kind="json", tokenizer_json=inner.to_str()))
    assert plain.fill_in_middle is None
    inner.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    able = Tokenizer.from_assets(TextAssets(kind="json", tokenizer_json=inner.to_str()))
    assert able.fill_in_middle is not None
    prompt = able.fill_in_middle.prompt(able.encode("a"), able.encode("b"))
    assert able.decode(prompt, skip_special_tokens=False) == "<fim_prefix>a<fim_suffix>b<fim_middle>"
