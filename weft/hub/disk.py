"""What a pull needs of the disk: room, and writes that survive a power cut."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from weft.errors import ModelError


def check_space(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise ModelError(
            f"{folder}: {needed_bytes / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free.",
            hint="Free some, or set WEFT_HOME to a folder on a larger disk.",
        )


def sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
