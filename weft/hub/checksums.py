"""Whether files are what a hub says they are. A digest of 64 digits is SHA-256, one of 40 is git's name of a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from weft.errors import ModelError
from weft.hub.progress import Progress, Report

READ_BYTES = 8 << 20


def damaged_files(folder: Path, digests: Mapping[str, str], report: Report, note: str) -> list[str]:
    """Of the files named, those whose content has another digest, and those that are not there."""
    there = {name: digest for name, digest in digests.items() if (folder / name).is_file()}
    total = sum((folder / name).stat().st_size for name in there)
    done = 0

    def read(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        report(Progress("verify", done, total, note))

    report(Progress("verify", 0, total, note))
    wrong = [name for name, digest in there.items() if digest_of(folder / name, digest, read) != digest]
    return sorted([*wrong, *(digests.keys() - there.keys())])


def digest_of(path: Path, like: str, read: Callable[[int], None]) -> str:
    """The digest of the same kind as `like`. `read` hears of every piece."""
    try:
        with path.open("rb") as file:
            if len(like) == 64:
                digest = hashlib.sha256()
            else:
                digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
            while piece := file.read(READ_BYTES):
                digest.update(piece)
                read(len(piece))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}.") from error
    return digest.hexdigest()
