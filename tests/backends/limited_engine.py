"""An engine process that may hold so many bytes: `python -m tests.backends.limited_engine BYTES FD`."""

from __future__ import annotations

import resource
import sys

from weft.engine import process

if __name__ == "__main__":
    most = int(sys.argv.pop(1))
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    process.main()
