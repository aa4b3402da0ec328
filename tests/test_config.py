"""Tests where a setting comes from, and how a wrong one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.config import RESERVED_ENV, load, nearest
from weft.errors import ConfigError
from weft.options import Config, settings


def toml(folder: Path, text: str) -> Path:
    file = folder / "weft.toml"
    file.write_text(text)
    return file


def test_flag_before_environment_before_file_before_default(tmp_path: Path) -> None:
    file = toml(tmp_path, "[scheduler]\nmax_num_seqs = 1\nmax_queued_requests = 1\nmax_prefill_chunk = 1\n")
    env = {"WEFT_MAX_NUM_SEQS": "2", "WEFT_MAX_QUEUED_REQUESTS": "2"}
    options = load({"max_num_seqs": 3}, file=file, env=env).scheduler
    assert (options.max_num_seqs, options.max_queued_requests, options.max_prefill_chunk) == (3, 2, 1)
    assert options.max_preemptions == Config().scheduler.max_preemptions


def test_without_anything_the_defaults_hold() -> None:
    assert load(env={}) == Config()


@pytest.mark.parametrize(("text", "value"), [("1", True), ("yes", True), ("False", False), ("no", False)])
def test_a_boolean_in_the_environment(text: str, value: bool) -> None:
    assert load(env={"WEFT_ENABLE_PREFIX_CACHING": text}).cache.enable_prefix_caching is value


def test_the_share_of_a_gpu_is_three_quarters_unless_told() -> None:
    assert load(env={}).cache.gpu_memory_utilization == 0.75
    assert load({"gpu_memory_utilization": 1.0}, env={}).cache.gpu_memory_utilization == 1.0
    for share in (0.0, 1.01, -0.5):
        with pytest.raises(ConfigError, match="--gpu-memory-utilization"):
            load({"gpu_memory_utilization": share}, env={})


def test_every_value_can_come_from_every_place(tmp_path: Path) -> None:
    for setting in settings():
        value = setting.choices[-1] if setting.choices else setting.default
        if setting.type == list[str]:
            value = ["a", "b"]
        written = str(value).lower() if isinstance(value, bool) else value
        quoted = f'"{value}"' if isinstance(value, str) else written
        if isinstance(value, list):
            written = ",".join(value)
        file = toml(tmp_path, f"[{setting.section}]\n{setting.name} = {quoted}\n")
        configs = [load({setting.name: value}, env={}), load(env={setting.env: str(written)}), load(file=file, env={})]
        assert [getattr(getattr(config, setting.section), setting.name) for config in configs] == [value] * 3


@pytest.mark.parametrize(
    ("flags", "env", "text", "place", "hint"),
    [
        ({"max_num_seq": 1}, {}, "", "--max-num-seq", "max_num_seqs"),
        ({}, {"WEFT_MAX_NUM_SEQ": "1"}, "", "WEFT_MAX_NUM_SEQ", "WEFT_MAX_NUM_SEQS"),
        ({}, {}, "[scheduler]\nmax_num_seq = 1", "[scheduler] max_num_seq", "max_num_seqs"),
        ({}, {}, "[schedular]\nmax_num_seqs = 1", "[schedular]", "scheduler"),
        ({}, {}, "[cache]\nmax_num_seqs = 1", "[cache]", "[scheduler]"),
        ({}, {}, "max_num_seqs = 1", "max_num_seqs", ""),
        ({}, {}, "[scheduler", "not valid TOML", ""),
        ({"device": "gpu"}, {}, "", "--device", "cpu"),
        ({}, {"WEFT_DTYPE": "float23"}, "", "WEFT_DTYPE", "float32"),
        ({"max_num_seqs": -1}, {}, "", "--max-num-seqs", ""),
        ({}, {"WEFT_PORT": "many"}, "", "WEFT_PORT", ""),
        ({}, {"WEFT_WITHOUT": "graphs,grafs"}, "", "grafs", "graphs"),
        ({}, {"WEFT_PORT": "70000"}, "", "WEFT_PORT", ""),
        ({}, {"WEFT_ENABLE_PREFIX_CACHING": "maybe"}, "", "WEFT_ENABLE_PREFIX_CACHING", ""),
        ({}, {}, "[server]\nport = '80'", "[server] port", ""),
    ],
)
def test_what_is_wrong_is_refused_with_its_place_and_the_nearest(
    flags: dict[str, object], env: dict[str, str], text: str, place: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(flags, env=env, file=toml(tmp_path, text) if text else None)
    assert place in refused.value.message
    assert hint in refused.value.hint


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(file=tmp_path / "none.toml", env={})


def test_other_environment_variables_are_let_be() -> None:
    load(env={"HOME": "/", **dict.fromkeys(RESERVED_ENV, "graphs")})


def test_every_setting_has_a_line_and_a_name_of_its_own() -> None:
    found = list(settings())
    assert all(setting.doc.endswith(".") and "\n" not in setting.doc for setting in found)
    assert len({setting.name for setting in found}) == len(found)


def test_sections_can_be_chosen() -> None:
    assert {setting.section for setting in settings("model", "cache")} == {"model", "cache"}


def test_a_name_is_proposed_once() -> None:
    assert nearest("x", ["model", "adapter", "model"]) == "Possible: adapter, model."


@pytest.mark.parametrize("name", ["api_key", "admin_key", "engine_api_key", "ssl_keyfile_password"])
def test_a_key_in_a_wrong_place_is_not_shown(tmp_path: Path, name: str) -> None:
    setting = next(setting for setting in settings() if setting.name == name)
    secret, wrong = ("sesame", '"sesame"') if setting.type == list[str] else (["sesame"], '["sesame"]')
    file = toml(tmp_path, f"[{setting.section}]\n{name} = {wrong}\n")
    for place in ({"flags": {name: secret}}, {"file": file}):
        with pytest.raises(ConfigError, match=f"{name}|{setting.flag}") as refused:
            load(**place, env={})  # type: ignore[arg-type]
        assert "is refused: Expected" in refused.value.message
        assert "sesame" not in str(refused.value)
