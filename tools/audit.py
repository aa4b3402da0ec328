"""Tells which locked packages have known vulnerabilities: python tools/audit.py FOLDER.

FOLDER is a checkout of github.com/pypa/advisory-database (`make audit` clones it), or any folder of advisories in the
OSV format, as YAML or JSON. The exit code is 1 when one holds for a version in requirements/ or constraints.txt.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parents[1]
LOCKED = ("requirements/build.txt", "requirements/serve.txt", "requirements/dev.txt", "constraints.txt")


def locked_versions() -> dict[str, Version]:
    """Return the version of every package that the Makefile installs."""
    lines = "\n".join((ROOT / file).read_text() for file in LOCKED)
    return {
        canonicalize_name(name): Version(version)
        for name, version in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", lines, re.MULTILINE)
    }


def advisories(folder: Path) -> Iterator[Mapping[str, Any]]:
    files = sorted(file for file in folder.rglob("*") if file.suffix in (".yaml", ".json") and ".git" not in file.parts)
    for file in track(files, description="Reading advisories", transient=True):
        text = file.read_text()
        if "affected" in text:
            yield json.loads(text) if file.suffix == ".json" else yaml.load(text, yaml.CSafeLoader)


def holds(affected: Mapping[str, Any], version: Version) -> bool:
    """Return whether this version is one of those that an advisory names, by itself or by a range."""
    if str(version) in affected.get("versions", ()):
        return True
    ranges = [each["events"] for each in affected.get("ranges", ()) if each["type"] != "GIT"]
    return any(_in_range(events, version) for events in ranges)


def _in_range(events: Sequence[Mapping[str, str]], version: Version) -> bool:
    """Events come in the order of their versions: the last one that is not above the version decides."""
    inside = False
    for event in events:
        ((kind, text),) = event.items()
        bound = Version("0") if text == "0" else _parsed(text)
        if bound is not None and (version > bound if kind == "last_affected" else version >= bound):
            inside = kind == "introduced"
    return inside


def _parsed(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def found(folder: Path, packages: Mapping[str, Version]) -> tuple[list[tuple[str, str, str]], int]:
    """Return what holds (package with its version, advisory, summary), and how many advisories were read."""
    hits: dict[tuple[str, str], tuple[str, str, str]] = {}
    count = 0
    for advisory in advisories(folder):
        count += 1
        for affected in () if advisory.get("withdrawn") else advisory["affected"]:
            name = canonicalize_name(affected.get("package", {}).get("name", ""))
            version = packages.get(name)
            if affected.get("package", {}).get("ecosystem") == "PyPI" and version and holds(affected, version):
                names = ", ".join([advisory["id"], *advisory.get("aliases", ())])
                told = advisory.get("summary") or advisory.get("details", "")
                hits[name, advisory["id"]] = (f"{name} {version}", names, " ".join(told.split())[:160])
    return sorted(hits.values()), count


def main() -> None:
    packages = locked_versions()
    hits, count = found(Path(sys.argv[1]), packages)
    console = Console()
    if hits:
        table = Table("package", "advisory", "what it says")
        for hit in hits:
            table.add_row(*hit)
        console.print(table)
    console.print(f"{len(hits)} of {count:,} advisories hold for {len(packages)} locked packages.")
    sys.exit(bool(hits) or not count)


if __name__ == "__main__":
    main()
