"""The playground: one self-contained page at / and /docs, with its script and its style.

The files are built from page/ by `make page` and lie in weft/data/page. They hold nothing of a server, so they need no
key; what the page asks of the server does. They are answered behind the check of the Host header and before that of
the key.
"""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib.resources import files

from msgspec import Struct
from starlette.types import Receive, Scope, Send

from weft.api.content_encoding import GZIP, accepts_gzip

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Scripts and styles come from this server's files alone, and no string becomes one: what a model writes cannot run."""

HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
    (b"vary", b"accept, accept-encoding"),
)

ROOT = "/"
_HTML = ("index.html", b"text/html; charset=utf-8")
FILES = {
    ROOT: _HTML,
    "/docs": _HTML,
    "/assets/page.js": ("page.js", b"text/javascript; charset=utf-8"),
    "/assets/page.css": ("page.css", b"text/css; charset=utf-8"),
}


ASSETS = tuple(path for path in FILES if path.startswith("/assets/"))


class PageFile(Struct, frozen=True):
    """A built file, as it is sent."""

    content_type: bytes
    body: bytes
    compressed: bytes
    etag: bytes


@cache
def page_files() -> dict[str, PageFile]:
    """Return the built files by their paths, compressed once for every client."""
    folder = files("weft") / "data" / "page"
    found: dict[str, PageFile] = {}
    for path, (name, content_type) in FILES.items():
        body = (folder / name).read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'.encode()
        found[path] = PageFile(content_type, body, gzip.compress(body, 9, mtime=0), etag)
    return found


class PlaygroundPage:
    """Answers GET and HEAD of the page's files. At / it answers browsers alone: for clients that do not ask for HTML
    there is the JSON that tells what the server is."""

    def __init__(self) -> None:
        self.files = page_files()

    def is_asked_for(self, scope: Scope) -> bool:
        """Return whether a request for the path of a file wants that file."""
        accept = dict(scope["headers"]).get(b"accept", b"")[:1024]
        return scope["method"] in ("GET", "HEAD") and (scope["path"] != ROOT or b"text/html" in accept.lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        file, headers = self.files[scope["path"]], dict(scope["headers"])
        answer = [*HEADERS, (b"content-type", file.content_type), (b"etag", file.etag)]
        if file.etag in headers.get(b"if-none-match", b"")[:1024]:
            await send({"type": "http.response.start", "status": 304, "headers": answer})
            await send({"type": "http.response.body"})
            return
        body = file.body
        # All browsers read gzip, and the files are small: other encodings would save a few KB.
        if accepts_gzip(headers.get(b"accept-encoding", b"")):
            body = file.compressed
            answer.append((b"content-encoding", GZIP.encode()))
        answer.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": 200, "headers": answer})
        await send({"type": "http.response.body", "body": body if scope["method"] == "GET" else b""})
