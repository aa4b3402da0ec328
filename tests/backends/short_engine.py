"""An engine process that may hold so many bytes, unawares: `python -m tests.backends.short_engine BYTES FD`."""

from __future__ import annotations

import resource
import sys

from weft.engine import process

if __name__ == "__main__":
    most = int(sys.argv.pop(1))
    from weft.worker import worker

    worker.available_cpu_bytes = lambda: 2**50
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    process.main()
