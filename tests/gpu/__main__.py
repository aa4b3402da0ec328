"""All tests on a GPU, several processes at a time: `python -m tests.gpu [options of pytest]`. Most of their time is the
compiler's, and pytest has one thread. Tests of ranks that share the device come first, those of its memory last."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ALONE = ["test_faults.py", "test_memory.py", "test_planning.py", "test_unload.py"]
"""Tests that need the memory of the whole device, or take it."""
RANKS = "test_tensor_parallel.py"
"""Ranks wait for each other in kernels, each for its turn on the device: few others may have turns meanwhile."""
BY_ITSELF = "test_kernels.py"
"""A file that has processes of its own."""
PROCESSES = 8
ENGINES_WITH_RANKS = 3


def run_pytest(tests: list[str], options: list[str]) -> tuple[int, str]:
    """Run tests, each printed as it ends. Return the exit code and all that pytest wrote."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--verbosity=1", *options, *tests]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        for line in running.stdout:
            lines.append(line)
            if "::" in line and "%]" in line:
                print(line, end="", flush=True)
    return running.returncode, "".join(lines)


def shares(processes: int, tests: list[str], options: list[str]) -> list[list[str]]:
    _, listed = run_pytest([*tests, "--collect-only", "--verbosity=-1"], options)
    names = [line for line in listed.splitlines() if "::" in line]
    if not names:
        print(f"No tests were found:\n{listed}", flush=True)
    return [names[first::processes] for first in range(min(processes, len(names)))]


def main() -> int:
    options = sys.argv[1:]
    began = time.monotonic()
    apart = [f"--ignore={HERE / name}" for name in (*ALONE, RANKS, BY_ITSELF)]
    waves = [
        shares(ENGINES_WITH_RANKS, [str(HERE / RANKS)], options),
        [[str(HERE / BY_ITSELF)], *shares(PROCESSES, [str(HERE), *apart], options)],
        [[str(HERE / name) for name in ALONE]],
    ]
    done = []
    with ThreadPoolExecutor(PROCESSES + 1) as pool:
        for wave in waves:
            done += pool.map(lambda share: run_pytest(share, options), wave)
    for code, text in done:
        if code:
            print(text)
    for _, text in done:
        print(text.strip().rpartition("\n")[2])
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if any(code for code, _ in done) or not all(waves) else 0


if __name__ == "__main__":
    raise SystemExit(main())
