"""An engine process that may hold so many bytes, unawares: `launch_engine("tests.backends.short_engine", BYTES)`."""

from __future__ import annotations

import resource
import sys

from weft.engine import process


def main() -> None:
    most = int(sys.argv.pop(1))
    from weft.worker import worker

    worker.available_cpu_bytes = lambda: 2**50
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    process.main()
