"""The wheel and the sdist: what is in them, and that an environment with the wheel alone serves the default model."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import weft
from weft.checkpoint.model_files import ModelFiles

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILT = ("README.md", "LICENSE", "pyproject.toml", "weft")
"""What the build reads. It is copied, so that no build/ folder of an earlier one can leak into the wheel."""


def run(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(source: Path, folder: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, cwd=folder.parent)
    (wheel,) = folder.glob("*.whl")
    return wheel


def files(wheel: Path) -> dict[str, bytes]:
    """Return the wheel's files of Weft itself."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.startswith("weft/")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in BUILT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    return build_wheel(source, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def sdist(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`make release` builds it with the same lines."""
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    source.mkdir()
    for name in BUILT:
        (source / name).symlink_to(ROOT / name)
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    run(sys.executable, "-W", "ignore", "-c", code, cwd=source)
    (made,) = folder.glob("*.tar.gz")
    return made


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean virtual environment with the wheel in it, whose dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin/python")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder.parent)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # The dependencies only: .pth files of a folder that is named in one, as that of an editable Weft, are not read.
    paths = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(paths) + "\n")
    return folder


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
    (tmp_path / "dist").mkdir()
    assert files(build_wheel(source, tmp_path / "dist")) == files(wheel)


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


def test_a_torch_for_cpus_that_is_there_stays(environment: Path, wheel: Path) -> None:
    """As after the README's first command: with no index to ask, nothing may be missing, and nothing is replaced."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", environment / "bin/python")
    told = run(*pip, "install", "--dry-run", "--no-index", wheel, cwd=environment)
    assert "Would install" not in told


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
