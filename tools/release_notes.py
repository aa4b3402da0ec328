"""Writes the notes of a release from CHANGELOG.md and the commits: python tools/release_notes.py [FROM[..TO]].

Without a range it is that from the last tag, or from the first commit, to HEAD. A commit stands under the part of Weft
in which it changed most lines; merges are left out. What the changelog says of this version comes first.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = {
    "Interfaces": ("weft/api/", "weft/serving/", "weft/text/", "weft/compat/"),
    "Engines": ("weft/engine/", "weft/scheduler/", "weft/worker/", "weft/backends/"),
    "Models and kernels": ("weft/model/", "weft/kernels/", "weft/checkpoint/", "weft/machine/", "weft/hub/"),
    "Command line and operation": ("weft/", "deploy/", "Dockerfile", "pyproject.toml", "requirements/"),
    "Documentation and examples": ("docs/", "examples/", "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"),
    "Tests and tools": ("",),
}
"""Headings, and where the files under each lie; the first that fits counts."""


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def version() -> str:
    (found,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "weft/__init__.py").read_text(), re.MULTILINE)
    return found


def commit_range(asked: str) -> str:
    if asked:
        return asked if ".." in asked else f"{asked}..HEAD"
    tags = git("tag", "--merged", "HEAD", "--sort=-creatordate").split()
    return f"{tags[0]}..HEAD" if tags else "HEAD"


def part_of(changes: str) -> str:
    """Return the heading for the lines of `git log --numstat`: added, removed and path of each file."""
    lines: Counter[str] = Counter()
    for added, removed, path in re.findall(r"^(\d+|-)\t(\d+|-)\t(.+)$", changes, re.MULTILINE):
        part = next(name for name, places in PARTS.items() if path.startswith(places))
        lines[part] += sum(int(count) for count in (added, removed) if count != "-") or 1
    return lines.most_common(1)[0][0] if lines else "Tests and tools"


def commits(wanted: str) -> dict[str, list[str]]:
    """Return the subjects of the commits by heading, the oldest first."""
    found: dict[str, list[str]] = {name: [] for name in PARTS}
    log = git("log", "--no-merges", "--reverse", "--numstat", "--format=%x00%s", wanted)
    for entry in log.split("\0")[1:]:
        subject, _, changes = entry.partition("\n")
        found[part_of(changes)].append(subject)
    return found


def changelog(name: str) -> str:
    """Return what CHANGELOG.md says of a version; where it has no section of its own, what is unreleased."""
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    by_name = {section.split(maxsplit=1)[0].strip("[]"): section.partition("\n")[2].strip() for section in sections}
    return by_name.get(name) or by_name.get("Unreleased", "")


def main() -> None:
    wanted = commit_range(sys.argv[1] if len(sys.argv) > 1 else "")
    lines = [f"# Weft {version()}", "", changelog(version()), "", "## Commits"]
    for name, subjects in commits(wanted).items():
        if subjects:
            lines += ["", f"### {name}", "", *(f"- {subject}" for subject in subjects)]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
