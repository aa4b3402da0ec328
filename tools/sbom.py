"""Writes the software bill of materials of a release, in CycloneDX's JSON: python tools/sbom.py FILE.

It names Weft, and every package that `make serve` installs: its version, licence and the hashes of its wheels, as
requirements/serve.txt has them. torch has no hashes: which of its builds is installed is the machine's to say.
"""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def locked() -> dict[str, tuple[str, list[str]]]:
    """Return name, version and hashes of what is installed with Weft."""
    lock = (ROOT / "requirements" / "serve.txt").read_text()
    packages = {
        name: (version, re.findall(r"--hash=sha256:([0-9a-f]{64})", hashes))
        for name, version, hashes in re.findall(r"^([A-Za-z0-9._-]+)==(\S+)((?: \\\n.*)*)", lock, re.MULTILINE)
    }
    (torch,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return packages | {"torch": (torch, [])}


def component(name: str, version: str, hashes: list[str]) -> dict[str, Any]:
    purl = f"pkg:pypi/{canonicalize_name(name)}@{version}"
    described: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if hashes:
        described["hashes"] = [{"alg": "SHA-256", "content": one} for one in hashes]
    if licence := licence_of(name):
        described["licenses"] = [{"license": {"name": licence}}]
    return described


def licence_of(name: str) -> str:
    """Return the licence's name as the package states it. Some have its whole text where the name should be."""
    about = metadata(name)
    classes = [each.rpartition(" :: ")[2] for each in about.get_all("Classifier", ()) if each.startswith("License ::")]
    stated = (about.get("License-Expression"), about.get("License"), " or ".join(classes))
    return next((each for each in stated if each and "\n" not in each), "")


def bill() -> dict[str, Any]:
    packages = [component(name, *about) for name, about in sorted(locked().items())]
    weft = component("weft-serve", metadata("weft-serve")["Version"], []) | {"type": "application"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"timestamp": datetime.now(UTC).isoformat(timespec="seconds"), "component": weft},
        "components": packages,
        "dependencies": [{"ref": weft["bom-ref"], "dependsOn": [one["bom-ref"] for one in packages]}],
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(bill(), indent=2) + "\n")
