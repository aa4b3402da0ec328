"""Compiled kernels are read from a folder that nobody else can have written in, or compiled again."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.waiting import wait_until
from weft import compile_cache as module
from weft.compile_cache import CPU, NAME, VARIABLE, compile_cache, compile_cache_environment
from weft.engine import process
from weft.engine.process import engine_environment


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home, with nothing in it; what is made instead of a folder in doubt lies below tmp_path as well."""
    folder, temporary = tmp_path / "home", tmp_path / "tmp"
    for made in (folder, temporary):
        made.mkdir(mode=0o700)
    for name in (VARIABLE, "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(module.tempfile, "tempdir", str(temporary))
    module._temporary.cache_clear()
    return folder


def planted(home: Path) -> Path:
    """A compiled kernel in the folder that is used."""
    folder = compile_cache() / CPU / "digest"
    folder.mkdir(parents=True)
    file = folder / "kernel"
    file.write_bytes(b"machine code")
    return file


def test_it_is_this_users_alone_and_apart_from_models(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", str(home / "models"))
    folder = compile_cache()
    assert folder == home / ".cache" / NAME
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not (home / "models").exists()


def test_what_was_compiled_is_found_again(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = planted(home)
    assert file.is_relative_to(compile_cache()) and not caplog.messages


def _open_folder(file: Path) -> None:
    compile_cache().chmod(0o755)


def _open_parent(file: Path) -> None:
    compile_cache().parent.chmod(0o777)


def _open_file(file: Path) -> None:
    file.chmod(0o666)


def _link_file(file: Path) -> None:
    file.unlink()
    file.symlink_to("/etc/hostname")


def _hard_link(file: Path) -> None:
    os.link(file, compile_cache().parent / "elsewhere")


@pytest.mark.parametrize("tamper", [_open_folder, _open_parent, _open_file, _link_file, _hard_link])
def test_in_doubt_it_is_compiled_again_elsewhere(
    home: Path, tamper: object, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    file = planted(home)
    assert callable(tamper)
    tamper(file)
    folder = compile_cache()
    assert folder.is_relative_to(tmp_path / "tmp") and not any((folder / CPU).iterdir())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert compile_cache() == folder and len(caplog.messages) == 1
    assert "compiled again" in caplog.messages[0] and VARIABLE in caplog.messages[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["folder", "parent", "file"])
def test_what_another_user_owns_is_not_used(home: Path, what: str, tmp_path: Path) -> None:
    file = planted(home)
    os.chown({"folder": compile_cache(), "parent": compile_cache().parent, "file": file}[what], 4711, 4711)
    assert compile_cache().is_relative_to(tmp_path / "tmp")


def test_a_home_that_cannot_be_written_is_no_error(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (home / ".cache").write_text("a file")
    assert compile_cache().is_relative_to(tmp_path / "tmp")
    assert "File exists" in caplog.text or "Not a directory" in caplog.text


def test_an_engine_and_its_compilers_are_led_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = engine_environment()
    root = home / ".cache" / NAME
    assert environment[VARIABLE] == str(root)
    assert environment["TRITON_CACHE_DIR"] == str(root / "triton")
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(root / "inductor")
    assert {stat.S_IMODE(part.stat().st_mode) for part in root.iterdir()} == {0o700}
    for name, value in compile_cache_environment().items():
        monkeypatch.setenv(name, value)
    assert engine_environment() == environment
    monkeypatch.setenv("TRITON_CACHE_DIR", "/operators/own")
    assert engine_environment()["TRITON_CACHE_DIR"] == "/operators/own"


KERNEL = """
import sys
from weft.kernels.cpu.compiled import cache_directory, object_files

assert object_files(["weft_argmax"])["weft_argmax"]
assert [file.name for file in cache_directory().iterdir()] == ["weft_argmax"]
assert "numba" not in sys.modules
print(cache_directory())
"""


def test_kernels_are_kept_there_and_not_beside_models(home: Path, tmp_path: Path) -> None:
    script, models = tmp_path / "kernel.py", tmp_path / "models"
    script.write_text(KERNEL)
    environment = {**os.environ, "WEFT_HOME": str(models), "TMPDIR": str(tmp_path / "tmp")}

    def run() -> Path:
        done = subprocess.run([sys.executable, script], env=environment, check=True, stdout=subprocess.PIPE, text=True)
        return Path(done.stdout.strip())

    assert run().is_relative_to(home / ".cache" / NAME) and not models.exists()
    compile_cache().chmod(0o777)
    assert run().is_relative_to(tmp_path / "tmp")
    assert not list((tmp_path / "tmp").glob(f"{NAME}-*")), "it ends with the process that made it"


def test_a_kernel_of_which_not_all_is_there_is_compiled_again(home: Path) -> None:
    pytest.importorskip("numba")
    from weft.kernels.cpu.compiled import _found, cache_directory, object_files

    code = object_files(["weft_argmax"])["weft_argmax"]
    kept = cache_directory() / "weft_argmax"
    whole = kept.read_bytes()
    assert whole.endswith(code) and stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert _found(kept.parent, [kept.name]) == {kept.name: code}
    for broken in (b"", b"no object file", whole[:-1]):
        kept.write_bytes(broken)
        assert not _found(kept.parent, [kept.name])
    assert object_files([kept.name])[kept.name] == code and kept.read_bytes() == whole


def test_a_kernel_that_another_process_compiles_is_waited_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    from weft.kernels.cpu import compiled

    monkeypatch.setattr(compiled, "_compile", lambda names: pytest.fail("it was compiled twice"))
    folder = compiled.cache_directory()
    with ThreadPoolExecutor(1) as pool:
        with compiled._alone_in(folder):
            found = pool.submit(compiled.object_files, ["weft_argmax"])
            compiled._write(folder / "weft_argmax", b"machine code")
        assert found.result() == {"weft_argmax": b"machine code"}


@pytest.mark.parametrize("has_kernels", [False, True])
def test_the_first_start_on_a_cpu_compiles_while_torch_is_imported(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_kernels: bool
) -> None:
    if has_kernels:
        planted(home)
    python, told = tmp_path / "python", tmp_path / "told"
    python.write_text(f'#!/bin/sh\necho "$@" "${VARIABLE}" > {told}.new && mv {told}.new {told}\n')
    python.chmod(0o700)
    monkeypatch.setattr(process, "shared_fork_server", lambda environment: None)
    monkeypatch.setattr(sys, "executable", str(python))
    process.expect_launch(on_cpu=True)
    if has_kernels:
        assert not any(thread.name == "weft-compiling" for thread in threading.enumerate())
    else:
        wait_until(told.exists, "the compiler")
        assert told.read_text() == f"-m weft.kernels.cpu.compiled {compile_cache()}\n"
