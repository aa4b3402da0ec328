"""The lock files: every package that a fresh machine installs is pinned by version and by the hashes of its wheels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PINNED = re.compile(r"([A-Za-z0-9._-]+)==(\S+)")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(file: str) -> dict[str, tuple[str, list[str]]]:
    """Each package's version and hashes."""
    found: dict[str, tuple[str, list[str]]] = {}
    for entry in (ROOT / "requirements" / file).read_text().replace(" \\\n", " ").splitlines():
        if not entry.startswith("#"):
            pin, *hashes = entry.split()
            match = PINNED.fullmatch(pin)
            assert match, entry
            found[canonical(match[1])] = match[2], [one.removeprefix("--hash=sha256:") for one in hashes]
    return found


@pytest.mark.parametrize("file", ["build.txt", "serve.txt", "dev.txt", "docs.txt", "deploy.txt"])
def test_every_package_has_the_hashes_of_its_wheels(file: str) -> None:
    assert locked(file)
    for name, (_, hashes) in locked(file).items():
        assert hashes and all(re.fullmatch("[0-9a-f]{64}", one) for one in hashes), name


def test_the_versions_are_those_of_the_constraints() -> None:
    pins = [
        PINNED.fullmatch(line.strip()) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    ]
    constraints = {canonical(pin[1]): pin[2] for pin in pins if pin}
    versions = {name: version for name, (version, _) in {**locked("build.txt"), **locked("dev.txt")}.items()}
    torch = constraints.pop("torch")
    assert torch and versions == constraints
    assert locked("serve.txt").items() <= locked("dev.txt").items()
