"""The layout of weft/: which package may import which, what no module may import, names that mean one thing, size."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import weft

PACKAGE = Path(weft.__file__).parent
GROUND = {
    *("types", "plan", "errors", "config", "options", "switches", "logs", "payloads", "compile_cache", "__init__"),
    *("engine_stats", "migration"),
}
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
    "cluster": {"backends", "engine", "scheduler", "text", "checkpoint", "machine", "hub", "observe"},
    "compat": {"backends", "text", "checkpoint", "machine", "models_file"},
    "serving": {"backends", "text", "observe"},
    "api": {"serving", "backends", "text", "observe", "terminal", "hub"},
    "llm": {"backends", "serving", "api", "checkpoint"},
    "bench": {"backends", "serving", "api", "machine", "terminal", "cluster"},
    "cli": {
        "model",
        "api",
        "serving",
        "backends",
        "checkpoint",
        "cluster",
        "machine",
        "hub",
        "observe",
        "bench",
        "llm",
        "terminal",
        "models_file",
        "text",
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

MAX_FILES = 342
MAX_LINES = 68_600
SMALL_LINES = 80
SMALL_ON_PURPOSE = {
    "weft.__main__": "`python -m weft` needs a module of this name",
    "weft.text.grammars.sandbox_child": "a script for a process that imports nothing of Weft",
    "weft.compat.factory": "a lazy name of weft.backends, which must not load it before it is asked for",
    "weft.cluster.autoscaler": "a whole idea, named by the field",
    "weft.scheduler.parallel_sampling": "a whole idea, named by the field",
    "weft.scheduler.prefix_cache": "a whole idea, named by the field",
    **{
        f"weft.bench.scripts.{name}": "a command that has its name from the system that it comes from"
        for name in ("benchmark_token_speed", "benchmark_ttft", "benchmark_compare", "monitor_grpc_messages")
    },
}
"""Modules below SMALL_LINES with one importer, and why each stands alone."""

LOOKED_AT = (ast.Import, ast.ImportFrom, ast.Call, ast.Assert)
FILES = sorted(PACKAGE.rglob("*.py"))
TOP_NAMES = {path.stem for path in PACKAGE.iterdir()}


def top_name(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return what the tests look at in a module, from one walk through it."""
    return [node for node in ast.walk(parsed(path)) if isinstance(node, LOOKED_AT)]


def imported_modules(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_run_one_way() -> None:
    for path in FILES:
        package = top_name(path)
        if package != "__init__" and path != PACKAGE / "backends/__init__.py":  # their names are lazy
            check_imports(path, package)


def check_imports(path: Path, package: str) -> None:
    allowed = GROUND | {package} | MAY_IMPORT.get(package, set())
    for module in imported_modules(nodes(path)):
        parts = module.split(".")
        if parts[0] == "weft" and len(parts) > 1 and parts[1] in TOP_NAMES:
            assert parts[1] in allowed, f"{package} imports {module}"
        assert parts[0] not in FORBIDDEN_MODULES, f"{path.name} imports {module}"


def dotted(node: ast.expr) -> str:
    """Return names with dots between them as they are written; what stands before other dots is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_nothing_executes_data() -> None:
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
                name = dotted(node.func)
                assert name not in FORBIDDEN_CALLS, f"{path}, line {node.lineno}: {name}"


def _only_narrows(node: ast.expr) -> bool:
    """Whether an expression tells a type checker what is known: nothing is computed in it, and no value is judged."""
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            return all(map(_only_narrows, values))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _only_narrows(operand)
        case ast.Call(func=ast.Name(id="isinstance")):
            return True
        case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
            return True
    return False


def test_python_without_asserts_runs_the_same() -> None:
    """`python -O` leaves asserts out: what must hold is checked by an `if`."""
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Assert):
                assert _only_narrows(node.test), f"{path}, line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("package", ["api", "serving"])
def test_the_api_knows_only_the_contract_of_an_engine(package: str) -> None:
    for path in (PACKAGE / package).rglob("*.py"):
        for module in imported_modules(nodes(path)):
            if module.startswith("weft.backends"):
                assert module.startswith("weft.backends.contract"), f"{path.name} imports {module}"


def test_the_api_process_never_imports_torch() -> None:
    script = (
        "import sys, importlib\n"
        "for name in ('weft.cli.main', 'weft.api.server', 'weft.backends.native', 'weft.llm'):\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(name)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_a_gpu_runs_needs_no_front_end_package() -> None:
    modules = [
        ".".join(("weft", *path.relative_to(PACKAGE).with_suffix("").parts))
        for package in ("scheduler", "kernels", "model", "worker")
        for path in sorted((PACKAGE / package).rglob("*.py"))
        if path.name != "__init__.py" and not {"cpu", "triton"} & set(path.parts)
    ]
    script = (
        "import sys, importlib\n"
        "from weft.engine.fork_server import DeferredImports\n"
        "DeferredImports().import_torch()\n"  # as an engine does
        f"[importlib.import_module(m) for m in {modules}]\n"
        "front = {'fastapi', 'starlette', 'uvicorn', 'pydantic', 'typer', 'prometheus_client', 'tokenizers', 'numba'}\n"
        "sys.exit(', '.join(front & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_module_says_what_it_is() -> None:
    for path in FILES:
        tree = parsed(path)
        assert not path.stat().st_size or path.name.endswith("_pb2.py") or ast.get_docstring(tree), path


def test_the_core_stays_readable_in_an_hour() -> None:
    assert sum(len((PACKAGE / name).read_text().splitlines()) for name in CORE) < 3100


def module_name(path: Path) -> str:
    return ".".join(("weft", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


def without_type_checking(tree: ast.Module) -> ast.Module:
    body = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    return ast.Module(body, type_ignores=[])


@cache
def dependencies(path: Path) -> set[str]:
    """Return the modules of weft that a module imports anywhere in its text. The names that a package offers for type
    checkers are loaded when they are asked for, and do not count."""
    is_package = path.name == "__init__.py"
    found = set()
    for name in imported_modules(ast.walk(without_type_checking(parsed(path))) if is_package else nodes(path)):
        module = name if name in MODULES else name.rpartition(".")[0]
        if module in MODULES and module not in ("weft", module_name(path)):
            found.add(module)
    return found


def test_no_modules_import_each_other() -> None:
    try:
        TopologicalSorter({name: dependencies(path) for name, path in MODULES.items()}).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_a_basename_means_one_thing() -> None:
    counted = Counter(path.stem for path in FILES if path.name != "__init__.py")
    assert [name for name, count in counted.items() if count > 1] == []


def test_a_class_name_means_one_thing() -> None:
    owners: dict[str, list[str]] = defaultdict(list)
    for name, path in MODULES.items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].append(name)
    assert {name: modules for name, modules in owners.items() if len(modules) > 1} == {}


def test_a_small_module_serves_more_than_one() -> None:
    importers = Counter(module for path in FILES for module in dependencies(path))
    small = {
        name
        for name, path in MODULES.items()
        if path.name != "__init__.py" and len(path.read_text().splitlines()) < SMALL_LINES and importers[name] < 2
    }
    assert small == SMALL_ON_PURPOSE.keys()


def test_the_whole_stays_small() -> None:
    assert len(FILES) <= MAX_FILES
    assert sum(len(path.read_text().splitlines()) for path in FILES) < MAX_LINES
