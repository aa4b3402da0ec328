"""The compiled kernels of this machine: object files, found in the cache or compiled by processes of their own. `python
-m weft.kernels.cpu.compiled` compiles those that the cache has not.

To load them takes LLVM alone. numba, which makes them, costs a process that imports it half a second and 40 MB more.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from weft.compile_cache import CPU, compile_cache
from weft.kernels.panel_format import FORMATS

# llvmlite has no types.
llvm: Any = import_module("llvmlite.binding")

log = logging.getLogger(__name__)

IS_ARM = platform.machine() in ("aarch64", "arm64")
# The word of Linux on a processor's abilities, and its bit for the dot products of Arm.
_HWCAP, _HWCAP_ASIMDDP = 16, 1 << 20


def _has_dot_products() -> bool:
    """Return whether this Arm processor has them, of which LLVM does not speak. Every Mac does."""
    return sys.platform == "darwin" or bool(ctypes.CDLL(None).getauxval(_HWCAP) & _HWCAP_ASIMDDP)


def _features() -> str:
    """Return what code may use: this machine's, or NUMBA_CPU_FEATURES. What a processor of some name can do beyond
    that is not known here."""
    chosen = os.environ.get("NUMBA_CPU_FEATURES", "" if os.environ.get("NUMBA_CPU_NAME") == "generic" else None)
    if chosen is not None:
        return chosen
    try:
        found = str(llvm.get_host_cpu_features().flatten())
    except RuntimeError:  # LLVM does not know this system
        found = ""
    if IS_ARM and _has_dot_products():
        return f"{found},+dotprod" if found else "+dotprod"
    return found


CPU_NAME: str = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
CPU_FEATURES = _features()
FEATURES = frozenset(feature[1:] for feature in CPU_FEATURES.split(",") if feature.startswith("+"))
WIDTH = 16 if "avx512f" in FEATURES else 8 if "avx2" in FEATURES else 4
"""Floats in a register."""

SYMBOL = "weft_"
"""Names of kernels begin so: they stand beside those of all libraries of the process."""
PANEL_KERNELS = [f"panel_linear_{kind}" for kind, _ in enumerate(FORMATS, 1)]
# The longest to compile come first.
KERNELS = tuple(
    SYMBOL + name for name in ("step", "attend", "stream_dots", "half_dots", "dots", *PANEL_KERNELS, "argmax")
)
"""The names of `jit.EXPORTS`, but for the one that only ranks need."""
_CHECKSUM_BYTES = hashlib.sha256().digest_size


class CompileError(Exception):
    """Says why there are no compiled kernels."""


_ENGINES: list[Any] = []
"""Those that hold the code of functions: what is loaded stays."""


class ObjectCode:
    """Object files, loaded together: they may call each other."""

    def __init__(self, objects: Iterable[bytes]) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        for code in objects:
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        _ENGINES.append(self._engine)

    def function(self, name: str, num_arguments: int) -> Callable[..., None]:
        """Return a kernel that takes so many int64s, as a function that runs without the GIL."""
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * num_arguments)
        function: Callable[..., None] = kind(self._engine.get_function_address(SYMBOL + name))
        return function


class Kernels:
    """The kernels that Python calls, loaded. Raises CompileError where they cannot be compiled."""

    def __init__(self) -> None:
        code = ObjectCode(object_files(KERNELS).values())
        self.step, self.argmax = code.function("step", 5), code.function("argmax", 4)


@cache
def part_of_step() -> Callable[..., None]:
    """Return the kernel for parts of steps, which only ranks need: it is compiled when the first one asks for it."""
    names = [name for name in KERNELS if name != SYMBOL + "step"] + [SYMBOL + "part"]
    return ObjectCode(object_files(names).values()).function("part", 6)


@cache
def kernels() -> Kernels:
    """Return the kernels of this process, loaded once. The first call on a machine compiles them."""
    return Kernels()


def cache_directory() -> Path:
    """Return where object files are kept, under a digest of all that decides what is in them."""
    here = Path(__file__).parent
    digest = hashlib.sha256(repr([sys.version, CPU_NAME, CPU_FEATURES, *map(_version, ("numba", "llvmlite"))]).encode())
    for source in (*sorted(here.glob("*.py")), here.parent / "panel_format.py"):
        digest.update(source.read_bytes())
    return compile_cache() / CPU / digest.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def object_files(names: Sequence[str]) -> dict[str, bytes]:
    """Return the object files of kernels. Those that are not in the cache are compiled. Raises CompileError."""
    folder = cache_directory()
    found = _found(folder, names)
    if len(found) == len(names):
        return found
    with _alone_in(folder):
        found = _found(folder, names)
        missing = [name for name in names if name not in found]
        made = _compile(missing) if missing else {}
        try:
            for name, code in made.items():
                _write(folder / name, code)
        except OSError as error:
            log.warning("Compiled kernels cannot be kept in %s (%s): each start compiles them.", folder, error)
    return found | made


def _found(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    read = {name: _read(folder / name) for name in names}
    return {name: code for name, code in read.items() if code is not None}


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process compiles into a folder, and keep others from it. Where files cannot be locked,
    several may do the same work."""
    with ExitStack() as locked:
        with suppress(OSError):
            file = os.open(folder.with_suffix(".lock"), os.O_CREAT | os.O_WRONLY, 0o600)
            locked.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(names: Sequence[str]) -> dict[str, bytes]:
    log.info("Compiling the kernels for this machine's CPU: some seconds, once.")
    # The sources that the digest is of, wherever this process has found them.
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "weft.kernels.cpu.exports", *names],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    if done.returncode:
        raise CompileError(next(reversed(done.stderr.decode(errors="replace").strip().splitlines()), "no message"))
    return msgspec.msgpack.decode(done.stdout, type=dict[str, bytes])


def _read(path: Path) -> bytes | None:
    """Return an object file, or None where there is none, or not all of it."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    checksum, code = stored[:_CHECKSUM_BYTES], stored[_CHECKSUM_BYTES:]
    return code if hashlib.sha256(code).digest() == checksum else None


def _write(path: Path, code: bytes) -> None:
    """Keep an object file. Others see all of it or nothing, and only this user may write it."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder, path.name)
        whole.touch(0o600)
        whole.write_bytes(hashlib.sha256(code).digest() + code)
        whole.replace(path)


if __name__ == "__main__":
    object_files(KERNELS)
