"""Measures, step by step, how long a new user waits for the first token: python tools/first_token.py.

Two ways: from a clone (`git clone`, `make` what `make serve` needs, `weft serve`, one chat), and from the wheel (a
virtual environment, `pip install`, `weft generate`). Everything is made in a temporary folder: caches of models and
compiled kernels begin empty, only pip's own cache and index are the machine's. It prints a table for
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
QUESTION = "What is the capital of France?"

Steps = list[tuple[str, float]]


class Stopwatch:
    """The steps so far, each with its seconds."""

    def __init__(self) -> None:
        self.steps: Steps = []

    def time(self, name: str, action: Callable[[], object]) -> None:
        started = time.perf_counter()
        action()
        self.steps.append((name, time.perf_counter() - started))
        sys.stderr.write(f"{self.steps[-1][1]:8.1f} s  {name}\n")


def environment(folder: Path) -> dict[str, str]:
    """Return an environment with homes of its own for models and kernels, and without an active Weft."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("WEFT_", "PYTHON", "VIRTUAL_ENV"))
    }
    return {**kept, "WEFT_HOME": str(folder / "home"), "WEFT_COMPILE_CACHE": str(folder / "compiled")}


def run(*command: object, cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(
            f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout


def first_piece(port: int) -> None:
    """Ask for a streamed chat, and read up to the first piece of its text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {
        "model": "smollm2",
        "stream": True,
        "temperature": 0,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        sys.exit(answer.read().decode())
    while line := answer.readline():
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
            break
    else:
        sys.exit("the answer had no text")
    connection.close()


def from_clone(folder: Path, python: str, commit: str) -> Steps:
    watch, clone, env = Stopwatch(), folder / "weft", environment(folder)
    watch.time("git clone", lambda: run("git", "clone", "--quiet", ROOT, clone, cwd=folder, env=env))
    run("git", "checkout", "--quiet", commit, cwd=clone, env=env)
    install = ("make", "--silent", ".venv/installed", f"PYTHON={python}")
    watch.time("make: virtual environment and packages", lambda: run(*install, cwd=clone, env=env))
    serve(watch, clone / ".venv/bin/weft", clone, env, "first ")
    serve(watch, clone / ".venv/bin/weft", clone, env, "second ")
    return watch.steps


def serve(watch: Stopwatch, weft: Path, cwd: Path, env: dict[str, str], which: str) -> None:
    """Start a server, wait until it is ready, and ask. The first one fetches the model and compiles the kernels."""
    command = [str(weft), "serve", "--port", "0", "--grpc-port", "0"]
    process = subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        lines: list[str] = []
        watch.time(f"{which}weft serve, to ready", lambda: lines.append(process.stdout.readline()))
        if "http://" not in lines[0]:
            process.kill()
            sys.exit(process.stderr.read())
        port = int(lines[0].split("http://")[1].split()[0].rstrip("/.").rpartition(":")[2])
        watch.time(f"{which}chat, to the first token", lambda: first_piece(port))
    finally:
        process.terminate()
        process.wait(120)


def from_wheel(folder: Path, python: str, commit: str) -> Steps:
    """The wheel is built before the clock runs; torch is what pip finds, in the version of constraints.txt."""
    env = environment(folder)
    pip = (
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        folder / "dist",
    )
    run("git", "clone", "--quiet", ROOT, folder / "source", cwd=folder, env=env)
    run("git", "checkout", "--quiet", commit, cwd=folder / "source", env=env)
    run(*pip, folder / "source", cwd=folder, env=env)
    (wheel,) = (folder / "dist").glob("*.whl")
    watch, venv = Stopwatch(), folder / "venv"
    watch.time("python -m venv", lambda: run(python, "-m", "venv", venv, cwd=folder, env=env))
    install = (venv / "bin/pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    watch.time("pip install weft-serve", lambda: run(*install, cwd=folder, env=env))
    generate = (venv / "bin/weft", "generate", QUESTION, "--max-tokens", "1", "--temperature", "0")
    watch.time("first weft generate: fetches the model, compiles", lambda: run(*generate, cwd=folder, env=env))
    watch.time("second weft generate", lambda: run(*generate, cwd=folder, env=env))
    return watch.steps


WAYS = {"clone": from_clone, "wheel": from_wheel}


def table(title: str, runs: list[Steps]) -> str:
    """Return the steps up to the first token, their sum, and what the second time takes."""
    rows = [(name, median(steps[place][1] for steps in runs)) for place, (name, _) in enumerate(runs[0])]
    sums = [sum(seconds for name, seconds in steps if not name.startswith("second ")) for steps in runs]
    first = [row for row in rows if not row[0].startswith("second ")]
    again = [row for row in rows if row[0].startswith("second ")]
    told = [*first, ("**to the first token**", median(sums)), *again]
    return "\n".join([f"| {title} | s |", "|---|---|", *(f"| {name} | {seconds:.1f} |" for name, seconds in told)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS])
    parser.add_argument("--python", default=sys.executable, help="the Python of the new environments")
    parser.add_argument("--commit", default="HEAD", help="the state of the repository that is measured")
    asked = parser.parse_args()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    sys.stdout.write(f"{machine}; medians of {asked.runs} runs\n")
    for way in asked.ways:
        runs = []
        for _ in range(asked.runs):
            folder = Path(tempfile.mkdtemp(prefix="weft-first-token-"))
            try:
                runs.append(WAYS[way](folder, asked.python, asked.commit))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        sys.stdout.write(f"\n{table(f'from a {way}', runs)}\n")


if __name__ == "__main__":
    main()
