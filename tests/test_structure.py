"""The plan of the house, kept by a test: which room may import which, and what nobody may import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import weft

PACKAGE = Path(weft.__file__).parent
GROUND = {"types", "plan", "errors", "config", "options", "switches", "logs", "payloads", "__init__"}
MAY_IMPORT: dict[str, set[str]] = {
    "scheduler": set(),
    "kernels": set(),
    "text": set(),
    "checkpoint": set(),
    "machine": {"checkpoint"},
    "hub": {"checkpoint"},
    "observe": set(),
    "models_file": {"hub", "checkpoint"},
    "terminal": {"backends", "serving"},
    "model": {"kernels", "checkpoint"},
    "worker": {"model", "kernels", "checkpoint", "machine"},
    "engine": {"scheduler", "worker", "checkpoint", "machine"},
    "backends": {"engine", "text", "checkpoint", "machine", "hub", "models_file"},
    "compat": {"backends", "text", "checkpoint", "machine", "models_file"},
    "serving": {"backends", "text", "observe"},
    "api": {"serving", "backends", "text", "observe", "terminal"},
    "llm": {"backends", "serving", "api", "checkpoint"},
    "bench": {"backends", "serving", "api", "terminal"},
    "cli": {
        "api",
        "serving",
        "backends",
        "checkpoint",
        "machine",
        "hub",
        "observe",
        "bench",
        "llm",
        "terminal",
        "models_file",
    },
    "__main__": {"cli"},
}
CORE = [
    "types.py",
    "plan.py",
    "scheduler/cursors.py",
    "scheduler/block_pool.py",
    "scheduler/prefix_cache.py",
    "scheduler/scheduler.py",
    "engine/core.py",
    "worker/runner.py",
    "model/dense.py",
    "kernels/reference.py",
]
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "torch.load", "torch.jit.load", "yaml.load", "os.system"}

FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = {path.stem for path in PACKAGE.iterdir()}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    room = room_of(path)
    if room == "__init__" or path == PACKAGE / "backends/__init__.py":  # their names are lazy
        return
    allowed = GROUND | {room} | MAY_IMPORT.get(room, set())
    for module in imported_modules(ast.parse(path.read_text())):
        parts = module.split(".")
        if parts[0] == "weft" and len(parts) > 1 and parts[1] in ROOMS:
            assert parts[1] in allowed, f"{room} imports {module}"
        assert parts[0] not in FORBIDDEN_MODULES, f"{path.name} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_executes_data(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in FORBIDDEN_CALLS, f"line {node.lineno}: {name}"


@pytest.mark.parametrize("room", ["api", "serving"])
def test_the_api_knows_only_the_contract_of_an_engine(room: str) -> None:
    for path in (PACKAGE / room).rglob("*.py"):
        for module in imported_modules(ast.parse(path.read_text())):
            if module.startswith("weft.backends"):
                assert module.startswith("weft.backends.contract"), f"{path.name} imports {module}"


@pytest.mark.parametrize("module", ["weft.cli", "weft.api.server", "weft.backends.native", "weft.llm"])
def test_the_api_process_never_imports_torch(module: str) -> None:
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("room", ["scheduler", "kernels", "model", "worker"])
def test_what_a_gpu_runs_needs_no_front_end_package(room: str) -> None:
    modules = [
        ".".join(("weft", *path.relative_to(PACKAGE).with_suffix("").parts))
        for path in sorted((PACKAGE / room).rglob("*.py"))
        if path.name != "__init__.py" and not {"cpu", "triton"} & set(path.parts)
    ]
    script = (
        f"import sys, importlib\n[importlib.import_module(m) for m in {modules}]\n"
        "front = {'fastapi', 'starlette', 'uvicorn', 'pydantic', 'typer', 'prometheus_client', 'tokenizers'}\n"
        "sys.exit(', '.join(front & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_core_stays_readable_in_an_hour() -> None:
    assert sum(len((PACKAGE / name).read_text().splitlines()) for name in CORE) < 3000
