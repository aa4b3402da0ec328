"""The folder of compiled kernels: the CPU's, Triton's and torch's. What lies there is run. So it is this user's alone,
apart from models, and is looked at before it is used."""

from __future__ import annotations

import atexit
import contextlib
import grp
import logging
import os
import pwd
import shutil
import stat
import tempfile
from functools import cache
from pathlib import Path

VARIABLE = "WEFT_COMPILE_CACHE"
NAME = "weft-compiled"
CPU = "cpu"
"""The part that Weft loads itself, every file of which is looked at."""
PARTS = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}

log = logging.getLogger(__name__)


def compile_cache() -> Path:
    """Return the folder, made for this user alone. Where others could have written what lies in it, that is not used:
    the folder is a new one then, which ends with this process."""
    try:
        root = _chosen()
        root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        root = root.resolve()
        doubt = _doubt(root) or _doubt_of_files(root / CPU)
        for part in () if doubt else (CPU, *PARTS.values()):
            (root / part).mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError) as error:
        root, doubt = Path(NAME), str(error)
    return _temporary(root, doubt) if doubt else root


def compile_cache_environment() -> dict[str, str]:
    """Return the environment that leads an engine process, and the compilers in it, to the folder."""
    root = compile_cache()
    return {VARIABLE: str(root), **{name: str(root / part) for name, part in PARTS.items()}}


def _chosen() -> Path:
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / NAME


def _doubt(folder: Path) -> str:
    """Return why others may have written in a folder; empty: they cannot have. Its parents count as well, up to the
    home: who can write there can put another folder in its place."""
    home = Path(os.environ.get("HOME") or "/").resolve()
    found = folder.lstat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077 or not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not this user's alone ({_described(found)}; it must be 0700)"
    for parent in folder.parents:
        found = parent.lstat()
        if found.st_uid not in (0, os.geteuid()):
            return f"{parent} is another user's ({_described(found)})"
        # In a folder like /tmp others can write, but not rename what is not theirs.
        if _others_write(found) and not found.st_mode & stat.S_ISVTX:
            return f"others can write in {parent} ({_described(found)})"
        if parent == home:
            break
    return ""


def _doubt_of_files(folder: Path) -> str:
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            try:
                found = path.lstat()
            except FileNotFoundError:  # another process is compiling
                continue
            is_known = stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink == 1)
            if found.st_uid != os.geteuid() or _others_write(found) or not is_known:
                return f"{path} is not this user's alone ({_described(found)})"
    return ""


def _others_write(found: os.stat_result) -> bool:
    """Return whether another user can write here. A group that is this user's own has no other."""
    if found.st_mode & stat.S_IWOTH:
        return True
    if not found.st_mode & stat.S_IWGRP:
        return False
    try:
        group, user = grp.getgrgid(found.st_gid), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return True
    return group.gr_name != user or not {*group.gr_mem} <= {user}


def _described(found: os.stat_result) -> str:
    return f"user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}"


@cache
def _temporary(root: Path, doubt: str) -> Path:
    """Make a folder for this process and its engines, once."""
    folder = Path(tempfile.mkdtemp(prefix=f"{NAME}-"))
    for part in (CPU, *PARTS.values()):
        (folder / part).mkdir(mode=0o700)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    log.warning(
        "The compiled kernels in %s are not used: %s. They are compiled again at every start, up to a minute each, "
        "into %s. Remove that folder, or name one with %s in which only this user can write.",
        root, doubt, folder, VARIABLE,
    )  # fmt: skip
    return folder
