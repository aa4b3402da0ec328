"""Every link of the pages has a target, every page can be found from the README, and named tests exist."""

from __future__ import annotations

import re
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
