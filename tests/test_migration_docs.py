"""docs/migration.md names every name of the source system, and only names that Weft has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft.backends.registry import BUILT_IN, OLD_NAMES
from weft.config import ENV_ALIASES, RESERVED_ENV
from weft.models_file import MEANINGLESS, OLD_KEYS
from weft.options import settings

PAGE = (Path(__file__).parents[1] / "docs" / "migration.md").read_text()
VARIABLES = """
    CY_LLM_ENGINE CY_LLM_BACKEND CY_LLM_MODEL_REGISTRY CY_LLM_MODEL_REGISTRY_PATH CY_LLM_DEFAULT_MODEL
    CY_LLM_DEFAULT_ADAPTER CY_LLM_INTERNAL_TOKEN CY_LLM_ALLOW_INSECURE_INTERNAL_TOKEN CY_LLM_ENV CY_LLM_GRPC_TLS_CERT
    CY_LLM_GRPC_TLS_KEY CY_LLM_GRPC_TLS_CA CY_LLM_ALLOW_INSECURE_GRPC CY_LLM_HEALTH_PORT CY_LLM_OTEL_ENDPOINT
    CY_LLM_PROMPT_CACHE_ENABLED CY_LLM_PROMPT_CACHE_TTL CY_LLM_ALLOW_PLACEHOLDER_MODEL CY_LLM_PORT COORDINATOR_UDS_PATH
    COORDINATOR_GRPC_ADDR GATEWAY_API_TOKEN GATEWAY_REQUEST_TIMEOUT GATEWAY_LITE_CONFIG COORDINATOR_GRPC_BIND
    WORKER_GRPC_ADDRS WORKER_UDS_PATH WORKER_UDS_PATHS COORDINATOR_CONFIG CY_LLM_CONDA_ENV CY_LLM_PYTHON_VERSION
    CY_LLM_MODEL CY_LLM_MODEL_CACHE CY_LLM_CHECKPOINT_DIR CY_LLM_WORKER_PORT CY_LLM_LITE_PORT
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


def section(heading: str) -> str:
    return PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def rows(heading: str) -> dict[str, str]:
    """Return the row of every name in the first column."""
    lines = re.findall(r"^\| (.+?) \| (.+?) \|$", section(heading), re.MULTILINE)
    return {name: here for there, here in lines for name in re.findall(r"`([^`]+)`", there)}


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Environment", VARIABLES.split()),
        ("Command line", [*COMMANDS.split(), "config validate", *OLD_FLAGS.split()]),
        ("Engines", [*OLD_NAMES, "cpu", "cuda-vllm", "cuda-vllm-async", "cuda-trt", "ascend-vllm", "ascend-mindie"]),
    ],
)
def test_no_name_is_left_out(heading: str, names: list[str]) -> None:
    told = " ".join(rows(heading))
    for name in names:
        assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", told), name


def test_what_the_environment_page_says_is_read_is_read() -> None:
    told = rows("Environment")
    assert {name for name, here in told.items() if here.startswith("**read**")} == set(ENV_ALIASES)
    for variable, setting in ENV_ALIASES.items():
        assert f"`WEFT_{setting.upper()}`" in told[variable]
    assert set(told) == set(VARIABLES.split())


def test_every_variable_and_flag_of_wefts_is_there() -> None:
    known = {setting.env for setting in settings()} | RESERVED_ENV
    assert set(re.findall(r"`(WEFT_\w+)`", PAGE)) <= known
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
    for name in OLD_NAMES:
        assert told[name].startswith("gone, because")


def test_what_is_a_flag_here_is_said_to_be_one() -> None:
    [default] = [setting.default for setting in settings("scheduler") if setting.name == "max_loras"]
    assert re.search(rf"^\| `max_loras` \| .*`--max-loras`: {default},", PAGE, re.MULTILINE)
    assert re.search(r"^\| `--adapter` \| the same:", PAGE, re.MULTILINE)
