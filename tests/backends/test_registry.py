"""The one table of engines, and those who read it."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

import weft.backends
from tests import forked
from tests.compat.test_adapted import Parrot
from weft.backends import (
    DEFAULT_ENGINE_PRIORITY,
    EngineFactory,
    check_engine_available,
    create_engine,
    list_engines,
    registry,
)
from weft.backends.registry import (
    BUILT_IN,
    PLATFORM_NAMES,
    PREFERENCE,
    engine_named,
    engines_in_order,
    expect_engine,
    why_unavailable,
)
from weft.cli import main as cli
from weft.cli.main import expect_engine_early
from weft.config import load
from weft.engine import process
from weft.errors import ConfigError, Unavailable
from weft.machine.devices import Accelerator

pytestmark = pytest.mark.usefixtures("no_weft_environment")

DOCS = Path(__file__).parents[2] / "docs" / "backends.md"


def test_the_names_and_the_order_are_those_that_were_promised() -> None:
    assert set(BUILT_IN) == {
        "native", "cuda-vllm-async", "cuda-vllm", "cpu-vllm", "ascend-vllm", "cuda-trt", "ascend-mindie", "remote",
        "replicas",
        "hybrid",
    }  # fmt: skip
    assert PREFERENCE["cuda"] == ("cuda-vllm-async", "cuda-vllm", "native")
    assert DEFAULT_ENGINE_PRIORITY == {"cuda": "cuda-vllm-async", "ascend": "ascend-vllm", "cpu": "native"}
    for names in PREFERENCE.values():
        assert set(names) <= set(BUILT_IN)
    assert engine_named("cpu") is engine_named("native")


def test_the_docs_have_the_same_table() -> None:
    text = DOCS.read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \| ([a-z]+) \| (.+) \|$", text, re.MULTILINE)
    assert {name: (platform, about) for name, platform, about in rows} == {
        spec.name: (spec.platform, spec.about) for spec in BUILT_IN.values()
    }
    for kind, names in PREFERENCE.items():
        assert f"{kind}: {', '.join(names)}" in text


@pytest.mark.parametrize("machine", ["cuda", "ascend", "cpu"])
def test_names_of_the_source_system_stand_for_engines(monkeypatch: pytest.MonkeyPatch, machine: Accelerator) -> None:
    monkeypatch.setattr(registry, "accelerator", lambda: machine)
    names = {old: tuple(spec.name for spec in engines_in_order(old)) for old in (*PLATFORM_NAMES, "vllm")}
    assert names["nvidia"] == names["cuda"] == PREFERENCE["cuda"]
    assert names["ascend"] == names["npu"] == PREFERENCE["ascend"]
    assert names["vllm"] == ({"cuda": "cuda-vllm-async", "ascend": "ascend-vllm", "cpu": "cpu-vllm"}[machine],)
    assert [spec.name for spec in engines_in_order("vllm,native")] == [*names["vllm"], "native"]


def test_an_engine_of_ones_own_keeps_its_name(add_engine: Callable[..., None]) -> None:
    add_engine("nvidia", "weft.backends.native:start_native")
    assert [spec.name for spec in engines_in_order("nvidia")] == ["nvidia"]


def test_a_name_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'cuda-vllm'"):
        engines_in_order("native,cuda-vlm")
    with pytest.raises(ConfigError, match="''"):
        engines_in_order("native,")


def test_every_start_is_where_the_table_says() -> None:
    """Without importing what an engine stands on."""
    import inspect

    for spec in BUILT_IN.values():
        assert isinstance(spec.start, str)
        module, _, name = spec.start.partition(":")
        assert inspect.iscoroutinefunction(getattr(importlib.import_module(module), name)), spec.name
    assert "vllm" not in sys.modules


def test_what_is_imported_here_is_not_imported_once_more_to_see_whether_it_can_be(
    add_engine: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = "from pathlib import Path\nwith Path(__file__).with_suffix('.txt').open('a') as file: file.write('i')"
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("here", "elsewhere"):
        (tmp_path / f"weft_test_{name}.py").write_text(counts)
        add_engine(f"t-{name}", "weft.backends.native:start_native", requires=(f"weft_test_{name}",))
    importlib.import_module("weft_test_here")
    assert check_engine_available("t-here") and check_engine_available("t-elsewhere")
    assert [(tmp_path / f"weft_test_{name}.txt").read_text() for name in ("here", "elsewhere")] == ["i", "i"]
    assert "weft_test_elsewhere" not in sys.modules


def test_available_means_installed_importable_and_with_its_hardware(
    add_engine: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weft_test_fine.py").write_text("")
    (tmp_path / "weft_test_broken.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    (tmp_path / "weft_test_deadly.py").write_text("import os; os.abort()")
    monkeypatch.syspath_prepend(str(tmp_path))
    for kind in ("fine", "broken", "deadly", "absent"):
        add_engine(f"t-{kind}", f"weft_test_{kind}:start", requires=(f"weft_test_{kind}",), install="pip install it")
    add_engine("t-cuda", "weft_test_fine:start", platform="cuda")
    monkeypatch.setattr(registry, "accelerator", lambda: "cpu")
    assert check_engine_available("t-fine") is True and why_unavailable("t-fine") == ""
    assert check_engine_available("native") and check_engine_available("cpu")
    assert why_unavailable("t-broken") == "OSError: libcudart.so.13: cannot open shared object file"
    assert "ended with -6" in why_unavailable("t-deadly") or "Aborted" in why_unavailable("t-deadly")
    assert why_unavailable("t-absent") == "weft_test_absent is not installed: pip install it"
    assert why_unavailable("t-cuda") == "this machine has no CUDA device"
    assert "Did you mean" in why_unavailable("cuda-vlm") and check_engine_available("cuda-vlm") is False
    assert "weft_test_fine" not in sys.modules, "it was not imported here"
    monkeypatch.setattr(registry, "accelerator", lambda: "cuda")
    assert check_engine_available("t-cuda")
    lines = {line.name: line for line in list_engines()}
    assert not lines["t-broken"].available and "libcudart" in lines["t-broken"].why_not
    assert set(BUILT_IN) < set(lines)


def test_auto_detect_is_the_first_that_can_be_used(
    add_engine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_engine("good", "weft.backends.native:start_native")
    add_engine("bad", "weft.backends.native:start_native", requires=("package_that_is_missing",))
    monkeypatch.setattr(registry, "PREFERENCE", {"cuda": ("bad", "good", "native"), "cpu": ("bad",), "ascend": ()})
    monkeypatch.setattr(registry, "accelerator", lambda: "cuda")
    assert EngineFactory.auto_detect() == "good"
    monkeypatch.setattr(registry, "accelerator", lambda: "cpu")
    with pytest.raises(Unavailable, match="bad: package_that_is_missing is not installed"):
        EngineFactory.auto_detect()
    monkeypatch.setenv("CY_LLM_ENGINE", "native")
    assert EngineFactory.auto_detect() == "native"
    monkeypatch.setenv("WEFT_ENGINE", "good")
    assert EngineFactory.auto_detect() == "good", "Weft's own variable wins"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"engine": "native"}, 1),
        ({"device": "cpu"}, 1),
        ({"engine": "remote", "engine_url": "http://127.0.0.1:1"}, 0),
        ({"engine": "remote,native"}, 1),
        ({"engine": "remote,native", "engine_url": "http://127.0.0.1:1"}, 0),
    ],
)
def test_a_process_is_prepared_where_the_first_engine_is_wefts_own(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], expected: int
) -> None:
    launches: list[int] = []
    monkeypatch.setattr(process, "expect_launch", lambda *, on_cpu: launches.append(1))
    expect_engine(load(settings))
    assert len(launches) == expected


@pytest.mark.parametrize(
    ("words", "engine", "expected"),
    [
        (["serve"], "native", 1),
        (["serve", "smollm2", "--port", "0"], "native", 1),
        (["serve"], "remote", 0),
        (["serve"], "no such engine", 0),
        (["serve", "--engine", "remote"], "native", 0),
        (["serve", "--engine=remote"], "native", 0),
        (["serve", "--models-file", "models.json"], "native", 0),
        (["serve", "--config", "weft.toml"], "native", 0),
        (["serve", "--help"], "native", 0),
        (["run", "smollm2"], "native", 0),
        ([], "native", 0),
    ],
)
def test_it_is_prepared_before_flags_are_parsed_where_these_do_not_choose_the_engine(
    monkeypatch: pytest.MonkeyPatch, words: list[str], engine: str, expected: int
) -> None:
    launches: list[int] = []
    monkeypatch.setattr(process, "expect_launch", lambda *, on_cpu: launches.append(1))
    monkeypatch.setenv("WEFT_ENGINE", engine)
    expect_engine_early(words)
    assert len(launches) == expected


def test_the_environment_and_the_flag_choose_the_engine() -> None:
    assert load({}, env={}).backend.engine == "auto"
    assert load({}, env={"CY_LLM_ENGINE": "cuda-vllm"}).backend.engine == "cuda-vllm"
    assert load({}, env={"WEFT_ENGINE": "native", "CY_LLM_ENGINE": "cuda-vllm"}).backend.engine == "native"
    assert load({"engine": "remote"}, env={"CY_LLM_ENGINE": "cuda-vllm"}).backend.engine == "remote"
    assert load({}, env={"CY_LLM_ENGINE": ""}).backend.engine == "auto"


@pytest.mark.usefixtures("table")
def test_an_engine_can_be_registered_once() -> None:
    with pytest.raises(ConfigError, match="parrot"):
        create_engine("parrot")
    EngineFactory.register("parrot", Parrot, about="Says it again.")
    with pytest.raises(ConfigError, match="already"):
        EngineFactory.register("parrot", Parrot)
    EngineFactory.register("parrot", "tests.compat.test_adapted:Parrot", overwrite=True)
    assert type(create_engine("parrot")).__name__ == "Parrot"
    for taken in ("native", "cpu", "auto"):
        with pytest.raises(ConfigError, match="already"):
            EngineFactory.register(taken, Parrot)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Packages that bring these entry points are installed."""

    def install(**points: str) -> None:
        found = [EntryPoint(name, value, "weft.engines") for name, value in points.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: found if group == "weft.engines" else [])
        registry._installed.cache_clear()

    registry._installed.cache_clear()
    yield install  # type: ignore[misc]
    registry._installed.cache_clear()


def test_other_packages_bring_engines(installed: Callable[..., None]) -> None:
    installed(parrot="tests.compat.test_adapted:Parrot")
    engine = create_engine("parrot")
    engine.load_model("any")
    assert "".join(engine.infer("hi")) == "hi hi"
    assert check_engine_available("parrot")
    assert engine_named("parrot").about


def test_a_broken_package_is_one_warning_and_no_crash(
    installed: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    installed(native="somebody:else", nothing="a.module", gone="package_that_is_missing:Engine", parrot="a:b")
    for _ in range(3):
        names = [line.name for line in list_engines()]
    assert "gone" in names and "nothing" not in names and engine_named("native") is BUILT_IN["native"]
    assert sorted(record.getMessage() for record in caplog.records) == [
        "The engine 'native' of an unknown package is left out: there is an engine of that name already.",
        "The engine 'nothing' of an unknown package is left out: 'a.module' is not of the form module:object.",
    ]
    assert "package_that_is_missing" in why_unavailable("gone")
    with pytest.raises(ConfigError, match="package_that_is_missing"):
        create_engine("gone")


def test_the_package_is_light_and_has_all_that_it_promises() -> None:
    script = (
        "import sys, weft.backends\n"
        "heavy = {'torch', 'numpy', 'msgspec', 'tokenizers', 'httpx', 'vllm', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from weft.backends import *\n"
        "assert DEFAULT_ENGINE_PRIORITY['cuda'] == 'cuda-vllm-async'\n"
        "assert EngineFactory.create is create_engine and list_engines and check_engine_available and BaseEngine\n"
        "assert not {'torch', 'vllm'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(weft.backends.__all__) == set(weft.backends._HOMES)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = weft.backends.nothing_such


def weft_command(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WEFT_", "CY_LLM_"))}
    return forked.weft(*arguments, environment=clean | (env or {}))


def test_the_command_lists_them() -> None:
    text = CliRunner().invoke(cli.app, ["engines"], env={"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}).output
    assert "Without --engine: native" in text and text.count("with --engine-url") == 3
    for spec in BUILT_IN.values():
        assert spec.name in text and spec.about in text
    assert re.search(r"native +any +yes", text)
    for command in ("serve", "generate", "chat"):
        assert "--engine-url" in CliRunner().invoke(cli.app, [command, "--help-all"], env={"COLUMNS": "300"}).output


def test_an_engine_that_would_not_be_taken_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is here, but a server without a URL would not start it."""
    monkeypatch.setenv("WEFT_ENGINE", "remote")
    with pytest.raises(Unavailable, match="remote: it needs --engine-url"):
        EngineFactory.auto_detect()
    assert (
        "Without --engine: none. No engine can be used here: remote:" in CliRunner().invoke(cli.app, "engines").output
    )
    monkeypatch.setenv("WEFT_ENGINE", "remote,native")
    assert EngineFactory.auto_detect() == "native"
    assert "Without --engine: native" in CliRunner().invoke(cli.app, "engines").output
    monkeypatch.setenv("WEFT_ENGINE_URL", "http://localhost:1/v1")
    assert EngineFactory.auto_detect() == "remote"


def test_a_name_that_is_not_there_is_two_lines_and_exit_code_2() -> None:
    done = weft_command("generate", "hi", "--engine", "nvidja")
    assert done.returncode == 2
    assert done.stderr == "There is no engine 'nvidja'.\nDid you mean 'nvidia'?\n"
    done = weft_command("generate", "hi", env={"CY_LLM_ENGINE": "remote"})
    assert done.returncode == 2 and "remote cannot be used: it needs --engine-url" in done.stderr
