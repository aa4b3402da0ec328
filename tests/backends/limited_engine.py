"""An engine process that may hold so many bytes: `launch_engine("tests.backends.limited_engine", BYTES)`."""

from __future__ import annotations

import resource
import sys

from weft.engine import process


def main() -> None:
    most = int(sys.argv.pop(1))
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    process.main()
