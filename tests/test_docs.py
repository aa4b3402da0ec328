"""Every link of the pages has a target, every page can be found from the README, and named tests exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests import forked

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")),
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


def test_source_files_are_in_english_end_with_a_line_and_name_nobodys_folder() -> None:
    """What models read and write may be in any language: data, and texts of tests."""
    for folder in ("weft", "scripts", "tools", "training", "docs", "tests", "examples", "deploy"):
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


def test_the_forecast_of_several_gpus_is_the_programs() -> None:
    made = subprocess.run([sys.executable, ROOT / "tools/tp_forecast.py"], check=True, capture_output=True, text=True)
    assert made.stdout in (ROOT / "docs/engines/native.md").read_text(), "run python tools/tp_forecast.py"


def test_plots_are_drawn_from_the_tables_as_they_are(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools/plots.py", tmp_path], check=True)
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    kept = {file.name: file.read_text() for file in (ROOT / "docs/images/plots").iterdir()}
    assert drawn == kept, "run python tools/plots.py"
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert all(f"(images/plots/{name})" in page for name in kept)


def nav() -> list[str]:
    """The pages that the site's navigation names."""

    class Loader(yaml.SafeLoader):
        """Reads over what is a Python object to mkdocs."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)

    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        entries = entry.values() if isinstance(entry, dict) else entry
        return [page for each in entries for page in pages(each)]

    return pages(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])


def test_the_site_leads_to_every_page() -> None:
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert there <= {*nav()}, there - {*nav()}
    others = {"index.md", "examples/README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    made = {f"reference/{name}.md" for name in ("cli", "config", "api", "metrics", "models")}
    assert {*nav()} <= there | others | made


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the site is built from."""
    folder = tmp_path_factory.mktemp("site") / "sources"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = forked.run(str(ROOT / "tools/reference.py"), str(folder), environment=environment)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_reference_has_every_command_setting_route_and_metric(sources: Path) -> None:
    from tests.api.http import request
    from tests.api.scripted_engine import ScriptedEngine
    from weft.options import settings

    told = {name: (sources / "reference" / f"{name}.md").read_text() for name in ("cli", "config", "api", "metrics")}
    for command in ("serve", "generate", "chat", "image", "pull", "bench serve", "config init", "doctor"):
        assert f"## weft {command}\n" in told["cli"]
    for setting in settings():
        assert f"| `{setting.flag}`<br>`{setting.env}` |" in told["config"]
    for path in request(ScriptedEngine(), "GET", "/openapi.json").json()["paths"]:
        assert re.search(rf"^## [A-Z]+ {re.escape(path)}$", told["api"], re.MULTILINE)
    for line in request(ScriptedEngine(), "GET", "/metrics").text.splitlines():
        found = re.match(r"# TYPE (weft_\w+) \w+", line)
        if found and not found[1].endswith("_created"):
            assert f"`{found[1]}`" in told["metrics"]


def test_the_site_builds_and_asks_for_nothing_elsewhere(sources: Path, tmp_path: Path) -> None:
    """`make docs` installs mkdocs-material into build/docs; a test that finds none says so."""
    mkdocs = ROOT / "build/docs/bin/mkdocs"
    if not mkdocs.exists():
        pytest.skip("mkdocs-material is not installed: make docs")
    site = tmp_path / "site"
    settings = (ROOT / "mkdocs.yml").read_text().replace("build/docs-source", str(sources))
    (tmp_path / "mkdocs.yml").write_text(settings)
    built = subprocess.run(
        [mkdocs, "build", "--strict", "--config-file", tmp_path / "mkdocs.yml", "--site-dir", site],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    for page in site.rglob("*.html"):
        loads = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//[^\">]*", page.read_text())
        assert not loads, page
