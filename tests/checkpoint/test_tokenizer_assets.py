"""Reads the tokenizer, template and facts of a model from both kinds of files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.gguf_bytes import BOOL, F32, I32, STRING, U32, array, gguf, pair, small_model, write
from tests.hub.fake_directory import SETTINGS, TOKENIZER, make_directory, put
from tests.hub.fake_model import ROOT
from weft.checkpoint.model_files import ModelFiles
from weft.checkpoint.tokenizer_assets import model_facts, text_assets
from weft.errors import ModelError
from weft.hub.resolve import resolve
from weft.types import TextAssets


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_directory(tmp_path / "my-model")


def of_gguf(folder: Path, *pairs: bytes) -> TextAssets:
    return text_assets(resolve(str(write(folder, gguf(pairs)))))


def of_directory(folder: Path) -> TextAssets:
    return text_assets(ModelFiles(name="m", kind="huggingface", path=folder, weight_files=[]))


LLAMA = (
    pair("tokenizer.ggml.model", STRING, "llama"),
    array("tokenizer.ggml.tokens", STRING, ["<unk>", "<s>", "</s>", "a"]),
    array("tokenizer.ggml.scores", F32, [0, 0, 0, -1]),
    array("tokenizer.ggml.token_type", I32, [2, 3, 3, 1]),
)


def test_a_gguf_file_carries_its_tokenizer(tmp_path: Path) -> None:
    assets = text_assets(resolve(str(write(tmp_path, small_model()))))
    assert (assets.kind, assets.pre, assets.merges) == ("gpt2", "smollm", ["a b"])
    assert assets.tokens == ["<|end|>", "a", "ß", "<|im_end|>"]
    assert assets.token_types == [3, 1, 1, 3]
    assert (assets.add_bos, assets.add_eos, assets.add_space_prefix) == (False, False, False)
    assert (assets.bos_token_id, assets.eos_token_id, assets.unk_token_id) == (None, 0, None)
    assert assets.chat_template == "{{ m }}<|im_end|>"


def test_the_turn_end_that_the_template_writes_ends_an_answer(tmp_path: Path) -> None:
    assert text_assets(resolve(str(write(tmp_path, small_model())))).eos_token_ids == [0, 3]


def test_a_llama_tokenizer_has_its_own_defaults(tmp_path: Path) -> None:
    assets = of_gguf(tmp_path, *LLAMA)
    assert (assets.add_bos, assets.add_eos, assets.add_space_prefix) == (True, False, True)
    assert (assets.bos_token_id, assets.eos_token_id, assets.unk_token_id) == (1, 2, 0)
    assert assets.scores == [0, 0, 0, -1]
    assert assets.eos_token_ids == [2]
    assert assets.chat_template is None


def test_a_gguf_file_overrides_the_defaults(tmp_path: Path) -> None:
    assets = of_gguf(
        tmp_path,
        *LLAMA,
        pair("tokenizer.ggml.add_bos_token", BOOL, 0),
        pair("tokenizer.ggml.add_eos_token", BOOL, 1),
        pair("tokenizer.ggml.add_space_prefix", BOOL, 0),
        pair("tokenizer.ggml.eot_token_id", U32, 3),
        pair("tokenizer.ggml.unknown_token_id", U32, 0xFFFFFFFF),
    )
    assert (assets.add_bos, assets.add_eos, assets.add_space_prefix) == (False, True, False)
    assert assets.eos_token_ids == [2, 3]
    assert assets.unk_token_id is None


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ((), r"tokenizer\.ggml\.model is missing"),
        ((pair("tokenizer.ggml.model", STRING, "bert"),), "'bert' is not supported; supported: gpt2, llama"),
        ((pair("tokenizer.ggml.model", STRING, "llama"),), "tokens is missing"),
        ((pair("tokenizer.ggml.model", STRING, "gpt2"), LLAMA[1]), "merges is missing"),
        ((LLAMA[0], array("tokenizer.ggml.tokens", I32, [1])), "tokens is of the wrong type"),
        ((*LLAMA[:2], array("tokenizer.ggml.scores", F32, [1])), "scores has 1 entries for 4 tokens"),
        ((*LLAMA, pair("tokenizer.ggml.eos_token_id", U32, 4)), "eos_token_id is 4, of 4 tokens"),
        ((*LLAMA, pair("tokenizer.ggml.add_bos_token", U32, 1)), "add_bos_token is of the wrong type"),
    ],
)
def test_a_wrong_gguf_tokenizer_is_refused(pairs: tuple[bytes, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        of_gguf(tmp_path, *pairs)


def test_the_facts_of_a_gguf_file_leave_the_vocabulary_out(tmp_path: Path) -> None:
    facts = model_facts(resolve(str(write(tmp_path, small_model()))))
    assert facts["llama.block_count"] == 2
    assert facts["test.numbers"] == [-1, 2]
    assert facts["tokenizer.ggml.eos_token_id"] == 0
    assert not {"tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_template"} & facts.keys()


def test_a_directory_carries_its_tokenizer(directory: Path) -> None:
    assets = of_directory(directory)
    assert assets.kind == "json"
    assert assets.tokenizer_json == (directory / "tokenizer.json").read_text()
    assert (assets.bos_token_id, assets.eos_token_id, assets.unk_token_id) == (2, 3, None)
    assert assets.eos_token_ids == [3, 1]
    assert assets.chat_template == "{{ settings }}"
    assert (assets.add_bos, assets.add_eos) == (True, False)


def test_the_settings_say_whether_a_text_begins_with_bos(directory: Path) -> None:
    put(directory, "tokenizer_config.json", SETTINGS | {"add_bos_token": False, "add_eos_token": True})
    assets = of_directory(directory)
    assert (assets.add_bos, assets.add_eos) == (False, True)


def test_named_templates_and_a_template_file(directory: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    put(directory, "tokenizer_config.json", {"chat_template": named})
    assert of_directory(directory).chat_template == "usual"
    put(directory, "chat_template.jinja", "of the file")
    assert of_directory(directory).chat_template == "of the file"


def test_little_is_needed_of_a_directory(directory: Path) -> None:
    for name in ("tokenizer_config.json", "generation_config.json"):
        (directory / name).unlink()
    put(directory, "special_tokens_map.json", {"bos_token": "<s>"})
    assets = of_directory(directory)
    assert (assets.bos_token_id, assets.eos_token_id, assets.eos_token_ids) == (2, 3, [3])
    assert assets.chat_template is None


def test_a_unigram_vocabulary_counts_its_pairs(directory: Path) -> None:
    put(directory, "tokenizer.json", {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["</s>", -1.0]]}})
    assert of_directory(directory).eos_token_id == 1


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"model": {"vocab": 3}, "added_tokens": 7, "post_processor": []},
        {"model": {"vocab": [3, [], [[]]]}, "added_tokens": [3, {"content": []}]},
        TOKENIZER
        | {"post_processor": {"type": "TemplateProcessing", "single": [3, {"SpecialToken": 1}], "special_tokens": {}}},
    ],
)
def test_fields_of_the_wrong_form_are_left_to_the_tokenizer_library(directory: Path, tokenizer: object) -> None:
    put(directory, "tokenizer.json", tokenizer)
    assert of_directory(directory).kind == "json"


def test_what_is_missing_or_broken_is_named(directory: Path) -> None:
    put(directory, "tokenizer_config.json", "{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: not valid JSON"):
        of_directory(directory)
    (directory / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="not UTF-8 text"):
        of_directory(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        of_directory(directory)


def test_the_facts_of_a_directory_are_its_configuration(directory: Path) -> None:
    assert model_facts(resolve(str(directory)))["architectures"] == ["LlamaForCausalLM"]


def test_the_room_imports_neither_torch_nor_the_hub_client() -> None:
    heavy = "{'torch', 'huggingface_hub', 'transformers', 'gguf'} & sys.modules.keys()"
    code = f"import sys, weft.checkpoint.tokenizer_assets, weft.hub.resolve; sys.exit(str({heavy}) if {heavy} else 0)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
