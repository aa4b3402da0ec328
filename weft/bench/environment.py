"""What a report must say of where it was made."""

from __future__ import annotations

import os
import platform
from typing import Any

from weft import __version__


def environment() -> dict[str, Any]:
    return {
        "weft": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
