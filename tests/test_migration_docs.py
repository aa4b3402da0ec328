"""The pages for users of other systems name every name that those have, and only names that Weft has."""

from __future__ import annotations

import ast
import functools
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

from weft.api.app import admission_app
from weft.backends.registry import BUILT_IN, PLATFORM_NAMES, VLLM
from weft.bench import commands
from weft.cli import main as cli
from weft.config import RESERVED_ENV, load
from weft.migration import PYPTO_KEYS, VARIABLES, Refused
from weft.models_file import MEANINGLESS, OLD_KEYS
from weft.observe import metrics
from weft.options import settings
from weft.serving.admission import Admission

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
PAGE = (DOCS / "migration.md").read_text()
OTHER_PAGES = ("migration-vllm-omni.md", "migration-pypto.md")
VARIABLES_NAMED = """
    CY_LLM_ENGINE CY_LLM_BACKEND CY_LLM_MODEL_REGISTRY CY_LLM_MODEL_REGISTRY_PATH CY_LLM_DEFAULT_MODEL
    CY_LLM_DEFAULT_ADAPTER CY_LLM_INTERNAL_TOKEN CY_LLM_ALLOW_INSECURE_INTERNAL_TOKEN CY_LLM_ENV CY_LLM_GRPC_TLS_CERT
    CY_LLM_GRPC_TLS_KEY CY_LLM_GRPC_TLS_CA CY_LLM_ALLOW_INSECURE_GRPC CY_LLM_HEALTH_PORT CY_LLM_OTEL_ENDPOINT
    CY_LLM_PROMPT_CACHE_ENABLED CY_LLM_PROMPT_CACHE_TTL CY_LLM_ALLOW_PLACEHOLDER_MODEL CY_LLM_PORT COORDINATOR_UDS_PATH
    COORDINATOR_GRPC_ADDR GATEWAY_API_TOKEN GATEWAY_REQUEST_TIMEOUT GATEWAY_LITE_CONFIG COORDINATOR_GRPC_BIND
    WORKER_GRPC_ADDRS WORKER_UDS_PATH WORKER_UDS_PATHS COORDINATOR_CONFIG CY_LLM_CONDA_ENV CY_LLM_PYTHON_VERSION
    CY_LLM_MODEL CY_LLM_MODEL_CACHE CY_LLM_CHECKPOINT_DIR CY_LLM_WORKER_PORT CY_LLM_LITE_PORT
    CY_LLM_COORDINATOR_HOST CY_LLM_COORDINATOR_PORT CY_LLM_WORKER_HOST
    CY_LLM_LITE_COORDINATOR_PORT CY_LLM_LITE_WORKER_PORT CY_LLM_SECURITY_ENABLED CY_LLM_API_KEY VLLM_TP VLLM_GPU_MEM
    VLLM_GPU_MEMORY_UTILIZATION HF_ENDPOINT HF_HOME HF_TOKEN SIDECAR_CONFIG SIDECAR_BIND_ADDR SIDECAR_WORKER_UDS
"""
REGISTRY_KEYS = """
    model_path adapter_path engine quantization use_4bit max_model_len tensor_parallel_size gpu_memory_utilization
    enable_prefix_caching kv_cache_dtype allow_auto_tuning enable_prompt_cache prompt_cache_ttl load_mode
    interactive_quantization model_source skip_validation use_safetensors
"""
COMMANDS = """
    setup start lite worker docker stop status diagnose doctor convert-trt test models prepare train chat
"""
OLD_FLAGS = """
    --env --adapter --checkpoint --coordinator-port --worker-port --daemon --skip-deps --skip-gradle --registry
    --max-workers --queue-size --uds-path --list-models --prompt --serve --max-new-tokens
"""


FLAG = re.compile(r"--[a-z][a-z-]+")


def section(heading: str, page: str = PAGE) -> str:
    return page.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def rows(heading: str, page: str = PAGE) -> dict[str, str]:
    """Return the row of every name in the first column."""
    lines = re.findall(r"^\| (.+?) \| (.+?) \|$", section(heading, page), re.MULTILINE)
    return {name: here for there, here in lines for name in re.findall(r"`([^`]+)`", there)}


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Environment", VARIABLES_NAMED.split()),
        ("Command line", [*COMMANDS.split(), "config validate", *OLD_FLAGS.split()]),
        (
            "Engines",
            [
                *PLATFORM_NAMES,
                VLLM,
                "preferred_backend",
                "cpu",
                "cuda-vllm",
                "cuda-vllm-async",
                "cuda-trt",
                "ascend-vllm",
                "ascend-mindie",
            ],
        ),
    ],
)
def test_no_name_is_left_out(heading: str, names: list[str]) -> None:
    told = " ".join(rows(heading))
    for name in names:
        assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", told), name


def test_what_the_environment_page_says_of_a_variable_is_done() -> None:
    told = rows("Environment")
    assert set(told) == set(VARIABLES.keys() | {"HF_ENDPOINT", "HF_HOME", "HF_TOKEN"}) == set(VARIABLES_NAMED.split())
    for variable, here in VARIABLES.items():
        if isinstance(here, Refused):
            assert told[variable].startswith("refused")
            assert ("unless" in told[variable]) == (here.unless is not None)
            assert set(re.findall(r"WEFT_\w+", here.instead)) <= set(re.findall(r"WEFT_\w+", told[variable])) | {
                "WEFT_GRPC_TLS_KEY",
                "WEFT_INSECURE",
            }
        else:
            assert told[variable].startswith("**read**") and f"`WEFT_{here.upper()}`" in told[variable]


def test_every_variable_and_flag_of_wefts_is_there() -> None:
    known = {setting.env for setting in settings()} | RESERVED_ENV
    assert set(re.findall(r"`(WEFT_\w+)(?:=\w+)?`", PAGE)) <= known
    flags = {setting.flag for setting in settings()}
    own = {"--config", "--max-tokens", "--temperature"}
    told = {flag for here in (*rows("gRPC").values(), *rows("Command line").values()) for flag in FLAG.findall(here)}
    assert told <= flags | own, told - flags - own


def test_the_registry_keys_are_all_named_and_known() -> None:
    named = set(re.findall(r"`([a-z_0-9]+)`", section("Model registry")))
    assert named == set(REGISTRY_KEYS.split())
    assert set(MEANINGLESS) <= named and set(OLD_KEYS) - {"model"} <= named


def test_engines_that_are_named_are_in_the_table() -> None:
    told = rows("Engines")
    for name in BUILT_IN.keys() & told.keys():
        assert not told[name].startswith("gone")
    for name in PLATFORM_NAMES:
        assert told[name].startswith(f"the engines of an {'NVIDIA' if PLATFORM_NAMES[name] == 'cuda' else 'Ascend'}")


def test_what_is_a_flag_here_is_said_to_be_one() -> None:
    [default] = [setting.default for setting in settings("scheduler") if setting.name == "max_loras"]
    assert re.search(rf"^\| `max_loras` \| .*`--max-loras`: {default},", PAGE, re.MULTILINE)
    assert re.search(r"^\| `--adapter` \| the same:", PAGE, re.MULTILINE)


def own_flags() -> set[str]:
    """Return every flag of every command."""

    def of(command: Any) -> set[str]:
        own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        inner = command.commands.values() if hasattr(command, "commands") else ()
        return own.union(*map(of, inner))

    apps = (cli.app, commands.app, *(import_module(f"weft.bench.scripts.{file.stem}").app for file in SCRIPTS))
    return set().union(*(of(typer.main.get_command(app)) for app in apps))


def own_routes() -> set[str]:
    return {route.path for route in admission_app(Admission(load({"admin_key": ["k"]}, env={}))).routes}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", OTHER_PAGES)
def test_what_the_other_pages_say_is_here_is_here(name: str) -> None:
    lines = re.findall(r"^\| (.+?) \| (.+?) \|$", (DOCS / name).read_text(), re.MULTILINE)
    # What there is none of may be named too.
    cells = [here for _, here in lines if not here.startswith("none")]
    flags = {flag for here in cells for flag in FLAG.findall(here)} - {"--dp"}
    assert flags <= own_flags(), flags - own_flags()
    variables = {word for here in cells for word in re.findall(r"WEFT_[A-Z_]+", here)}
    assert variables <= RESERVED_ENV | {setting.env for setting in settings()}
    routes = own_routes()
    told = {
        path for here in cells for path in re.findall(r"`(?:GET |POST )?(/(?:v1|admin|health|metrics)[\w/]*)`", here)
    }
    assert told and told <= routes, told - routes
    families = Path(metrics.__file__).read_text()
    for metric in {word for here in cells for word in re.findall(r"`(weft_\w+)`", here)}:
        assert f'"{metric.removesuffix("_total")}"' in families, metric


def test_the_page_of_pypto_has_every_key_of_its_file() -> None:
    told = rows("The configuration file", (DOCS / "migration-pypto.md").read_text())
    for path, here in PYPTO_KEYS.items():
        row = told[".".join(path)]
        if isinstance(here, str):
            assert row.startswith("**read**") and f"`{here}`" in row
        else:
            assert "refused" in row


@functools.cache
def functions_of(file: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_line_of_the_requirements_has_tests_that_are_there_and_commands_that_work() -> None:
    page = (DOCS / "requirements.md").read_text()
    done, _, left_out = page.partition("\n## Not built, and why\n")
    lines = re.findall(r"^\| (.+) \|$", done, re.MULTILINE)
    rows = [line.split(" | ") for line in lines if not line.endswith("| command")]
    assert len(rows) > 200 and all(len(row) == 4 for row in rows)
    assert left_out and "partly" not in page
    for _, _, tests, _ in rows:
        cited = re.findall(r"`(tests/\S+)::(test_\w+)`", tests)
        assert cited and ", ".join(f"`{file}::{name}`" for file, name in cited) == tests
        for file, name in cited:
            assert name in functions_of(ROOT / file), f"{file} has no {name}"
    typed = "\n".join(command for *_, command in rows)
    assert set(FLAG.findall(page)) <= own_flags(), set(FLAG.findall(page)) - own_flags()
    assert set(re.findall(r"`(/[\w/.]+)`", typed)) <= own_routes()
    assert {ROOT / script for script in re.findall(r"scripts/\w+\.py", typed)} <= set(SCRIPTS)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)", typed)) <= targets
    for module in set(re.findall(r"python -m ([\w.]+)", typed)):
        assert find_spec(module), module
