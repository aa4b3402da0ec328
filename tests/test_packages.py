"""The wheel and the sdist: what is in them, and that an environment with the wheel alone serves the default model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

import weft
from weft.checkpoint.model_files import ModelFiles

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILT = ("README.md", "LICENSE", "pyproject.toml", "weft")
"""What the build reads. It is linked, so that no build/ folder of an earlier one can leak into the wheel."""


def run(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, folder: Path, *kinds: str) -> list[Path]:
    """Build a wheel or an sdist in a process, as pip does: it calls the same functions."""
    code = f"from setuptools import build_meta as build; [getattr(build, kind)({str(folder)!r}) for kind in {kinds}]"
    folder.mkdir(exist_ok=True)
    run(sys.executable, "-W", "ignore", "-c", code, cwd=source)
    return sorted(folder.iterdir())


def files(wheel: Path) -> dict[str, bytes]:
    """Return the wheel's files of Weft itself."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.startswith("weft/")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    source = tmp_path_factory.mktemp("source")
    for name in BUILT:
        (source / name).symlink_to(ROOT / name)
    return build(source, tmp_path_factory.mktemp("dist"), "build_sdist", "build_wheel")


@pytest.fixture(scope="module")
def wheel(built: list[Path]) -> Path:
    (found,) = (path for path in built if path.suffix == ".whl")
    return found


@pytest.fixture(scope="module")
def sdist(built: list[Path]) -> Path:
    (found,) = (path for path in built if path.suffix == ".gz")
    return found


class Installed(NamedTuple):
    environment: Path
    told: str
    """What pip says after it has installed the wheel."""


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A clean virtual environment whose dependencies are those of this one, and the wheel, which pip has installed with
    no index to ask."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    dependencies = folder / "dependencies"
    dependencies.mkdir()
    for path in (path for name in sys.path if name.endswith("site-packages") for path in Path(name).iterdir()):
        if not path.name.startswith(("weft", "__editable__")):
            (dependencies / path.name).symlink_to(path)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin/python")
    # What is not imported need not be compiled.
    told = run(*pip, "install", "--no-compile", "--no-index", wheel, cwd=folder.parent)
    return Installed(folder, told)


@pytest.fixture(scope="module")
def environment(installed: Installed) -> Path:
    return installed.environment


def weft_command(environment: Path, *words: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV"))}
    return run(environment / "bin/weft", *words, cwd=environment, env=clean)


def test_the_distribution_has_a_name_of_its_own_and_one_version(wheel: Path) -> None:
    assert PROJECT["name"] == "weft-serve" and PROJECT["dynamic"] == ["version"]
    assert wheel.name == f"weft_serve-{weft.__version__}-py3-none-any.whl"


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "weft", cwd=ROOT).split()
    there = {name for name in tracked if (ROOT / name).exists()}
    assert files(wheel).keys() == there


def test_a_wheel_made_from_the_sdist_is_the_same(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("weft_serve-*")
    (again,) = build(source, tmp_path / "dist", "build_wheel")
    assert files(again) == files(wheel)


def test_the_installed_wheel_tells_its_version(environment: Path) -> None:
    assert weft_command(environment, "version") == f"weft {weft.__version__}\n"
    python = environment / "bin/python"
    where = run(python, "-c", "import weft; print(weft.__file__)", cwd=environment, env={})
    assert where.startswith(str(environment))


def test_the_installed_wheel_generates(environment: Path, smollm2_files: ModelFiles) -> None:
    answer = weft_command(
        environment, "generate", "What is the capital of Germany?", "--temperature", "0", "--max-tokens", "24"
    )
    assert "Berlin" in answer


def test_every_hint_and_page_names_the_distribution() -> None:
    """`pip install weft` would fetch a stranger's package."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "weft").rglob("*.py"), ROOT / "Makefile"]
    for page in pages:
        assert not re.search(r"pip install (?:--?\S+ )*['\"]?weft(?!-serve)\b", page.read_text()), page
        assert not re.search(r"['\"` ]weft\[\w+\]", page.read_text()), page


def test_every_extra_that_is_named_exists() -> None:
    extras = PROJECT["optional-dependencies"]
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "weft").rglob("*.py")]:
        for named in re.findall(r"weft-serve\[([\w,]+)\]", page.read_text()):
            assert {*named.split(",")} <= extras.keys(), page


def test_the_cpu_kernels_are_in_the_default_install() -> None:
    assert any(re.match(r"numba\b", each) for each in PROJECT["dependencies"])


def test_a_torch_for_cpus_that_is_there_stays(installed: Installed) -> None:
    """As after the README's first command: nothing is missing, and nothing is replaced."""
    (done,) = re.findall("^Successfully installed (.*)$", installed.told, re.MULTILINE)
    assert done == f"weft-serve-{weft.__version__}"
    assert re.search("^Requirement already satisfied: torch", installed.told, re.MULTILINE)


def test_make_asks_for_torch_where_this_machine_s_build_is() -> None:
    told = run("make", "--dry-run", "--always-make", ".venv/installed", cwd=ROOT)
    (line,) = re.findall(r"^.+ install .+ torch$", told, re.MULTILINE)
    for_cpus = sys.platform == "linux" and not Path("/dev/nvidiactl").exists()
    assert ("--extra-index-url https://download.pytorch.org/whl/cpu" in line) == for_cpus
    assert "whl/cpu" not in run("make", "--dry-run", "--always-make", ".venv/installed", "TORCH_INDEX=", cwd=ROOT)


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_on_a_cpu_torch_s_build_for_cpus_comes_first(page: str) -> None:
    commands = re.findall(r"^pip install .+$", (ROOT / page).read_text(), re.MULTILINE)
    assert commands[:2] == [
        "pip install torch --index-url https://download.pytorch.org/whl/cpu",
        "pip install weft-serve",
    ]
