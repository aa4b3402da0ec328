"""All tests on a GPU, several processes at a time: `python -m tests.gpu [options of pytest]`. Most of their time is the
compiler's, and pytest has one thread. Tests of the device's memory run last, alone."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ALONE = ["test_memory.py", "test_planning.py", "test_unload.py"]
"""Tests that need the memory of the whole device."""
BY_ITSELF = "test_kernels.py"
"""A file that has processes of its own."""
PROCESSES = 8


def run_pytest(tests: list[str], options: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *options, *tests]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def collected(options: list[str]) -> list[str]:
    """Return the tests that share the device, but for those of the file that runs by itself."""
    apart = [f"--ignore={HERE / name}" for name in (*ALONE, BY_ITSELF)]
    listed = run_pytest([str(HERE), "--collect-only", *apart], options).stdout
    return [line for line in listed.splitlines() if "::" in line]


def main() -> int:
    options = sys.argv[1:]
    began = time.monotonic()
    tests = collected(options)
    shares = [[str(HERE / BY_ITSELF)], *filter(None, (tests[first::PROCESSES] for first in range(PROCESSES)))]
    with ThreadPoolExecutor(len(shares)) as pool:
        done = list(pool.map(lambda share: run_pytest(share, options), shares))
    done.append(run_pytest([str(HERE / name) for name in ALONE], options))
    failed = [one for one in done if one.returncode]
    for one in failed:
        print(one.stdout)
    for one in done:
        print(one.stdout.strip().rpartition("\n")[2])
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if failed or not tests else 0


if __name__ == "__main__":
    raise SystemExit(main())
