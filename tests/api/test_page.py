"""The playground's files, and the headers that they are sent with. tests/page looks at them in a browser."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.http import request
from tests.api.scripted_engine import ScriptedEngine, answer
from weft.api.page import FILES, page_files
from weft.config import load

ROOT = Path(__file__).parents[2]
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
KEYS = load({"api_key": ["k"]}, env={})
MAX_COMPRESSED_KB = 250


def get(path: str, headers: dict[str, str] = BROWSER, method: str = "GET", **options: Any) -> httpx.Response:
    return request(ScriptedEngine(answer("hello")), method, path, headers=headers, **options)


def test_the_page_is_small() -> None:
    sizes = {file.etag: len(file.compressed) for file in page_files().values()}
    assert sum(sizes.values()) <= MAX_COMPRESSED_KB << 10


@pytest.mark.parametrize("path", FILES)
def test_every_file_has_the_strict_headers(path: str) -> None:
    response = get(path)
    assert response.status_code == 200 and response.headers["content-type"] == FILES[path][1].decode()
    policy = dict(item.partition(" ")[::2] for item in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["x-frame-options"] == "DENY"


def test_nothing_in_it_leads_to_another_server() -> None:
    html = page_files()["/"].body.decode()
    assert re.findall(r"(?:src|href)=\"(?!data:)([^\"]+)\"", html) == ["assets/page.css", "assets/page.js"]
    assert "<style" not in html and not re.search(r"<script(?! src)|\son\w+=", html)
    for path in ("/assets/page.js", "/assets/page.css"):
        addresses = re.findall(r"https?://[\w.:/-]+", page_files()[path].body.decode())
        assert {*addresses} <= {"http://www.w3.org/1998/Math/MathML", "http://www.w3.org/2000/svg",
                                "http://www.w3.org/1999/xhtml"}  # fmt: skip


def test_files_are_compressed_and_known_again() -> None:
    plain = get("/assets/page.js", {"accept-encoding": "identity"})
    packed = get("/assets/page.js", {"accept-encoding": "br, gzip"})
    assert "content-encoding" not in plain.headers and packed.headers["content-encoding"] == "gzip"
    assert packed.content == plain.content == page_files()["/assets/page.js"].body
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"])
    assert "content-encoding" not in get("/assets/page.js", {"accept-encoding": "gzip;q=0, zstd"}).headers
    again = get("/assets/page.js", {"if-none-match": plain.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert get("/assets/page.js", {"if-none-match": '"another"'}).status_code == 200
    head = get("/assets/page.js", {"accept-encoding": "identity"}, method="HEAD")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == plain.headers["content-length"]


def test_clients_that_want_no_page_get_the_servers_card() -> None:
    assert get("/", {"accept": "*/*"}).json()["name"] == "Weft"
    assert get("/", {"accept": "application/json"}).json()["docs"] == "/openapi.json"
    assert get("/").text.startswith("<!doctype html>")


@pytest.mark.parametrize("path", FILES)
def test_the_page_needs_no_key_and_what_it_asks_for_does(path: str) -> None:
    assert get(path, config=KEYS).status_code == 200
    for asked in ("/openapi.json", "/v1/models", "/version"):
        assert get(asked, config=KEYS).status_code == 401
    assert get("/", {"accept": "*/*"}, config=KEYS).status_code == 401


@pytest.mark.parametrize("path", FILES)
def test_it_can_be_left_out(path: str) -> None:
    response = get(path, config=load({"page": False}, env={}))
    if path == "/":
        assert response.json()["name"] == "Weft"
    else:
        assert response.status_code == 404


@pytest.mark.parametrize("path", ["/assets/", "/assets/page.map", "/assets/../index.html", "/docs/", "/index.html",
                                  "/assets/%2e%2e/LICENSES.txt", "/favicon.ico"])  # fmt: skip
def test_there_are_no_other_files(path: str) -> None:
    assert get(path).status_code == 404


def test_files_are_only_read() -> None:
    assert get("/assets/page.js", method="POST").status_code in (404, 405)
    assert get("/docs", method="DELETE").status_code in (404, 405)


def test_a_page_of_another_host_name_is_refused() -> None:
    """Without keys a name that leads to this machine by a trick (DNS rebinding) gets nothing, not even the page."""
    assert get("/docs", BROWSER | {"host": "evil.example"}).status_code == 421


def test_compressed_files_are_the_files() -> None:
    for file in page_files().values():
        assert gzip.decompress(file.compressed) == file.body


def test_the_sources_give_the_committed_bytes(tmp_path: Path) -> None:
    """`make page` builds the same files from page/ on every machine."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node is not installed: `make page` needs it")
    sources = tmp_path / "page"
    shutil.copytree(ROOT / "page", sources, ignore=shutil.ignore_patterns("node_modules"))
    if (ROOT / "page/node_modules/.package-lock.json").exists():
        (sources / "node_modules").symlink_to(ROOT / "page/node_modules")
    else:
        try:
            fetched = subprocess.run([npm, "ci"], cwd=sources, capture_output=True, text=True, timeout=240, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip("`npm ci` did not end: is there a registry of packages?")
        if fetched.returncode:
            pytest.skip(f"`npm ci` could not fetch the packages: {fetched.stderr[-300:]}")
    subprocess.run([node, "build.mjs", str(tmp_path / "built")], cwd=sources, check=True, capture_output=True)
    committed = ROOT / "weft/data/page"
    assert {path.name for path in committed.iterdir()} == {path.name for path in (tmp_path / "built").iterdir()}
    for path in committed.iterdir():
        assert path.read_bytes() == (tmp_path / "built" / path.name).read_bytes(), f"{path.name}: run `make page`"
