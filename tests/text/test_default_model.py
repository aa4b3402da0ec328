"""The default model's own vocabulary and template."""

from __future__ import annotations

import pytest

from weft.text.chat_template import ChatTemplate
from weft.text.detokenizer import Detokenizer
from weft.text.tokenizer import Tokenizer
from weft.types import TextAssets

TEXTS = [
    "The weft runs across the warp.",
    "def f(x):\n    return x ** 2  # 1024\n\n\n",
    "今天天气怎么样？🎉👩‍👩‍👧",
    "   spaces \t\t and\r\nlines   ",
    "<|im_start|>user\nhi<|im_end|>\n",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_assets: TextAssets) -> Tokenizer:
    return Tokenizer.from_assets(smollm2_assets)


def test_the_vocabulary_is_as_published(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert 2 in tokenizer.eos_token_ids
    assert tokenizer.special_ids == set(range(17))


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_whole_and_in_a_stream(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=False)
    assert "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush() == text


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode("in   2024")] == [
        "in",
        "   ",
        "2",
        "0",
        "2",
        "4",
    ]


def test_the_template_writes_the_default_system_prompt(smollm2_assets: TextAssets, tokenizer: Tokenizer) -> None:
    template = ChatTemplate.from_assets(smollm2_assets, tokenizer)
    assert template.render([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
