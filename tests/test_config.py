"""Tests where a setting comes from, and how a wrong one is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft.cli.main import app
from weft.config import FORMATS, RESERVED_ENV, load, nearest, template
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


def test_the_source_systems_numbers_are_defaults() -> None:
    config = load(env={})
    assert (config.grpc.grpc_buffer_size, config.grpc.grpc_flush_interval_ms) == (8, 50)
    assert (config.engine.start_timeout_s, config.engine.step_timeout_s) == (600, 300)
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8000)
    assert config.scheduler.max_embedding_mb == 1024


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
        ({}, {}, "[scheduler]\nmax_num_seq = 1", "weft.toml:2, [scheduler] max_num_seq", "max_num_seqs"),
        ({}, {}, "[schedular]\nmax_num_seqs = 1", "[schedular]", "scheduler"),
        ({}, {}, "[cache]\nmax_num_seqs = 1", "[cache]", "[scheduler]"),
        ({}, {}, "max_num_seqs = 1", "max_num_seqs", ""),
        ({}, {}, "[scheduler", "weft.toml:1: not valid TOML", ""),
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


SAME = {
    "toml": "[scheduler]\nmax_num_seqs = 7\n[server]\nport = 81\napi_key = ['a', 'b']\n",
    "yaml": "scheduler:\n  max_num_seqs: 7\n  max_loras:\nserver:\n  port: 81\n  api_key: [a, b]\ncache:\n",
    "json": '{"scheduler": {"max_num_seqs": 7, "max_loras": null},\n "server": {"port": 81, "api_key": ["a", "b"]}}',
}
"""The same settings in every format; null stands for what is not given."""


@pytest.mark.parametrize(("form", "text"), SAME.items())
def test_a_file_says_the_same_in_every_format(tmp_path: Path, form: str, text: str) -> None:
    for suffix in FORMATS[form]:
        file = tmp_path / f"weft{suffix}"
        file.write_text(text)
        config = load(file=file, env={})
        assert (config.scheduler.max_num_seqs, config.server.port, config.server.api_key) == (7, 81, ["a", "b"])
        assert config.scheduler.max_loras == Config().scheduler.max_loras


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "weft.yaml",
            "server:\n  prt: 1\n",
            "weft.yaml:2, [server] prt: there is no setting 'prt'. Did you mean 'port'",
        ),
        ("weft.json", '{"server":\n {"port": "x"}}', "weft.json:2, [server] port: 'x' is refused: Expected `int`"),
        ("weft.json", '{"server": {"port": 1,\n "port": 2}}', "weft.json:2: duplicate key 'port', first on line 1"),
        ("weft.yaml", "server: [", "weft.yaml:1: not valid YAML"),
        ("weft.json", "[]", "not a table of sections"),
        ("weft.yaml", "server: 3", "weft.yaml:1: there is no section [server]"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(file=tmp_path / name, env={})


def test_a_file_without_a_telling_suffix_is_toml(tmp_path: Path) -> None:
    file = tmp_path / "weft.conf"
    file.write_text("[server]\nport = 9\n")
    assert load(file=file, env={}).server.port == 9


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weft.json"
    file.write_text(" " * (1 << 20) + "{}")
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load(file=file, env={})


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_of_all_settings_changes_nothing_commented_out_or_not(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"weft.{form}"
    text = template(form)
    names = "|".join(setting.name for setting in settings())
    live = re.sub(rf"^( *)# ((?:{names})(?: =|:) .+)$", r"\1\2", text, flags=re.MULTILINE)
    for written in (text, live):
        file.write_text(written)
        assert load(file=file, env={}) == Config()
    for setting in settings():
        assert re.search(rf'^ *"?{setting.name}"?(?: =|:) ', live, re.MULTILINE)
        assert form == "json" or setting.doc in text


def test_init_writes_a_file_once(tmp_path: Path) -> None:
    file = tmp_path / "weft.json"
    run = CliRunner().invoke
    assert "JSON has no comments" in run(app, ["config", "init", str(file)]).output
    assert json.loads(file.read_text())["server"]["port"] == 8000
    file.write_text("kept")
    with pytest.raises(ConfigError, match="exists"):
        run(app, ["config", "init", str(file)], catch_exceptions=False)
    assert file.read_text() == "kept"
    assert run(app, ["config", "init", str(file), "--force"]).exit_code == 0
    with pytest.raises(ConfigError, match="would be read as json, and --format is yaml"):
        run(app, ["config", "init", str(file), "--format", "yaml", "--force"], catch_exceptions=False)


def test_check_shows_what_differs_and_no_key(tmp_path: Path) -> None:
    file = toml(tmp_path, '[server]\nport = 8123\napi_key = ["sesame"]\n')
    env = {"WEFT_MAX_NUM_SEQS": "3", "COLUMNS": "400"}
    done = CliRunner().invoke(app, ["config", "check", str(file)], env=env)
    assert done.exit_code == 0, done.output
    words = [line.split() for line in done.output.splitlines()]
    assert any(line[:4] == ["server", "port", "8123", "8000"] and f"{file}:2," in line for line in words)
    assert any(line[:4] == ["scheduler", "max_num_seqs", "3", "0"] and "WEFT_MAX_NUM_SEQS" in line for line in words)
    assert "api_key" in done.output and "sesame" not in done.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server]\nprt = 1", "Did you mean 'port'?"),
        ("[server]\nhost = '0.0.0.0'", "no API key is set"),
        ("[server]\napi_key_file = '/no/keys'", "/no/keys: No such file"),
        ("[grpc]\ngrpc_tls_cert = 'a.pem'", "TLS needs a certificate and its key"),
        ("[backend]\nengine = 'cuda-vlm'", "Did you mean 'cuda-vllm'?"),
        ("[backend]\nengine = 'native'\nengine_url = 'http://a/v1'", "--engine-url is set"),
        ("[fleet]\nmodels_file = '/no/models.json'", "/no/models.json: No such file"),
    ],
)
def test_check_ends_with_1_where_serve_would_not_start(tmp_path: Path, text: str, said: str) -> None:
    done = CliRunner().invoke(app, ["config", "check", str(toml(tmp_path, text))])
    assert done.exit_code == 1
    assert said in done.output
