"""What goes out with a release: the audit of the locked packages, and the bill of materials."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run(tool: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / tool, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def locked_version(name: str) -> str:
    (version,) = re.findall(rf"^{name}==(\S+)", (ROOT / "requirements" / "serve.txt").read_text(), re.MULTILINE)
    return version


def advisory(affected: dict[str, Any], name: str = "starlette", **more: Any) -> dict[str, Any]:
    package = {"name": name, "ecosystem": "PyPI"}
    return {"details": "It is bad.", "affected": [{"package": package, **affected}], **more}


def events(*each: dict[str, str], kind: str = "ECOSYSTEM") -> dict[str, Any]:
    return {"ranges": [{"type": kind, "events": list(each)}]}


HERE = locked_version("starlette")
HOLDS = [
    advisory({"versions": ["0.1", HERE]}),
    advisory(events({"introduced": "0"})),
    advisory(events({"introduced": "0"}, {"last_affected": HERE})),
    advisory(events({"introduced": "0"}, {"fixed": "0.2"}, {"introduced": HERE}, {"fixed": "999"}), name="Starlette"),
]
DOES_NOT = [
    advisory({"versions": ["0.1"]}),
    advisory(events({"introduced": "0"}, {"fixed": HERE})),
    advisory(events({"introduced": "0"}, {"last_affected": "0.2"})),
    advisory(events({"introduced": "0"}, kind="GIT")),
    advisory(events({"introduced": "0"}), name="not-installed-here"),
    advisory(events({"introduced": "0"}), withdrawn="2026-01-01T00:00:00Z"),
]


def write(folder: Path, told: list[dict[str, Any]]) -> None:
    for number, one in enumerate(told):
        (folder / f"{number}.json").write_text(json.dumps({**one, "id": f"PYSEC-0000-{number}"}))


def test_advisories_that_hold_for_locked_versions(tmp_path: Path) -> None:
    write(tmp_path, HOLDS)
    lines = [
        "id: PYSEC-0000-9",
        "affected:",
        "- package: {name: starlette, ecosystem: PyPI}",
        f"  versions: ['{HERE}']",
    ]
    (tmp_path / "9.yaml").write_text("\n".join(lines))
    audit = run("audit.py", tmp_path)
    assert audit.returncode == 1, audit.stderr
    assert re.findall(r"PYSEC-0000-(\d)", audit.stdout) == ["0", "1", "2", "3", "9"]


def test_advisories_that_do_not(tmp_path: Path) -> None:
    write(tmp_path, DOES_NOT)
    audit = run("audit.py", tmp_path)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert f"0 of {len(DOES_NOT)} advisories" in audit.stdout


def test_no_advisories_at_all_are_no_clean_bill(tmp_path: Path) -> None:
    assert run("audit.py", tmp_path).returncode == 1


def test_the_bill_of_materials_names_every_package_that_is_installed_with_weft(tmp_path: Path) -> None:
    written = run("sbom.py", tmp_path / "bill.json")
    assert written.returncode == 0, written.stderr
    bill = json.loads((tmp_path / "bill.json").read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "weft-serve")
    lock = (ROOT / "requirements" / "serve.txt").read_text()
    pins = {f"{name}=={version}" for name, version in re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", lock, re.MULTILINE)}
    named = {f"{one['name']}=={one['version']}": one for one in bill["components"]}
    torch = next(pin for pin in named if pin.startswith("torch=="))
    assert named.keys() == pins | {torch}
    for pin in pins:
        assert all(f"sha256:{one['content']}" in lock for one in named[pin]["hashes"]), pin
    assert not [pin for pin, one in named.items() if "licenses" not in one]


def test_release_notes_have_every_commit_once_under_the_part_that_it_changed(tmp_path: Path) -> None:
    """A repository of its own, with the tool and the version in it: this one may have no history, as an archive."""

    def git(*words: str) -> None:
        identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    def commit(path: str, subject: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(subject)
        git("add", "--all")
        git("commit", "--message", subject)

    for name in ("tools/release_notes.py", "weft/__init__.py", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    git("init", "--quiet")
    commit("weft/api/chat.py", "before the tag")
    git("tag", "v0")
    commit("weft/api/chat.py", "a field of chats")
    commit("weft/kernels/cpu.py", "a faster kernel")
    commit("docs/API.md", "a page")
    command = [sys.executable, tmp_path / "tools/release_notes.py"]
    notes = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, _, commits = notes.partition("## Commits")
    assert re.findall(r"^(?:### |- )(.+)$", commits, re.MULTILINE) == [
        *("Interfaces", "a field of chats"),
        *("Models and kernels", "a faster kernel"),
        *("Documentation and examples", "a page"),
    ]
    assert "The distribution is named `weft-serve`" in notes
