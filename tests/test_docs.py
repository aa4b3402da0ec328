"""Every link of the pages has a target, every page can be found from the README, and named tests exist."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[tuple[Path, str]]:
    """Return the files that a page links to, each with the heading behind #."""
    found = re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)", FENCED.sub("", page.read_text()))
    return [((page.parent / name).resolve() if name else page, part) for name, part in found if ":" not in name]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, part in links(page):
        assert target.exists(), f"{target} is not there"
        assert not part or part in anchors(target), f"{target} has no heading #{part}"


def test_every_page_can_be_found_from_the_readme() -> None:
    found, new = set(), {ROOT / "README.md"}
    while new:
        page = new.pop()
        found.add(page)
        new |= {target for target, _ in links(page) if target.suffix == ".md" and target.exists()} - found
        new |= {file for target, _ in links(page) if target.is_dir() for file in target.glob("*.md")} - found
    assert set(PAGES) <= found, f"not found: {set(PAGES) - found}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_are_named_are_there(page: Path) -> None:
    for name in re.findall(r"`(tests/[\w/]+\.py)`", page.read_text()):
        assert (ROOT / name).exists(), name


def test_every_fault_has_a_test_for_every_engine() -> None:
    """There are five faults and three kinds of engine."""
    page = (ROOT / "docs/faults.md").read_text()
    rows = re.findall(r"^\| (native|vLLM|remote) \|.*\| (.+) \|$", page, re.MULTILINE)
    assert [engine for engine, _ in rows] == ["native", "vLLM", "remote"] * 5
    assert all("`tests/" in tests for _, tests in rows)


def test_every_module_says_what_it_is() -> None:
    for file in (ROOT / "weft").rglob("*.py"):
        text = file.read_text()
        assert not text or file.name.endswith("_pb2.py") or ast.get_docstring(ast.parse(text)), file


def test_source_files_are_in_english_end_with_a_line_and_name_nobodys_folder() -> None:
    """What models read and write may be in any language: data, and texts of tests."""
    for folder in ("weft", "scripts", "tools", "training", "docs", "tests"):
        for file in (file for end in ("*.py", "*.md", "*.toml") for file in (ROOT / folder).rglob(end)):
            text = file.read_text()
            assert not text or text.endswith("\n"), file
            assert folder == "tests" or not re.search("[\u3040-\u30ff\u4e00-\u9fff]", text), file
            assert not re.search(r"/(?:home|Users)/(?!secret)\w", text), file


def test_the_linter_looks_for_what_reviews_found() -> None:
    """Names defined twice and f-strings without fields (F), files without a last newline (W), blind excepts (BLE), logs
    that are formatted before they are wanted (G); and every function has its types."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert {"F", "W", "BLE", "G"} <= set(tools["ruff"]["lint"]["select"])
    assert not {"F541", "F811", "W292", "BLE001", "G004"} & set(tools["ruff"]["lint"]["ignore"])
    assert tools["mypy"]["strict"] and tools["mypy"]["files"] == ["weft"]
