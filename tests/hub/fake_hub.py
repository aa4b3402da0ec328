"""A hub on this machine, with the answers of huggingface.co and modelscope.cn that their own clients need."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.waiting import PATIENCE

LFS_SUFFIX = (".safetensors", ".gguf")


class FakeHub:
    """A hub that serves the files of a folder as one model."""

    def __init__(self, folder: Path, hub_id: str = "org/name") -> None:
        self.folder = folder
        self.hub_id = hub_id
        self.commits = {"main": "1" * 40, "v1": "1" * 40, "1" * 40: "1" * 40}
        self.asked: list[str] = []
        """Every requested path, with its query."""
        self.ranges: list[str] = []
        self.tokens: set[str | None] = set()
        self.refusal: tuple[int, str] | None = None
        """The status and the error code of every answer."""
        self.cuts: dict[str, int] = {}
        """Bytes after which the first answer with a file is broken off, by file."""
        self.hang = threading.Event()
        self.hangs = False
        """True to send no byte of a file before `hang` is set."""
        self.lies: dict[str, bytes] = {}
        """Content of files that does not match their digests."""
        self.url = ""

    def digest(self, name: str) -> str:
        content = (self.folder / name).read_bytes()
        if name.endswith(LFS_SUFFIX):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def names(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())

    def content(self, name: str) -> bytes:
        return self.lies.get(name) or (self.folder / name).read_bytes()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, url = self.hub, urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        hub.asked.append(self.path)
        hub.tokens.add(self.headers.get("Authorization"))
        match unquote(url.path).strip("/").split("/", 5):
            case _ if hub.refusal is not None:
                self._say(hub.refusal[0], {}, {"X-Error-Code": hub.refusal[1]})
            case ["api", "models", owner, name, *rest] if f"{owner}/{name}" == hub.hub_id:
                self._huggingface_facts(rest[1] if rest else "main", as_tree=rest[:1] == ["tree"])
            case [owner, name, "resolve", commit, *rest] if f"{owner}/{name}" == hub.hub_id:
                self._file("/".join(rest), {"X-Repo-Commit": commit})
            case ["api", "v1", "models", "org", "name", "repo/files"]:
                self._modelscope_files(query)
            case ["api", "v1", "models", "org", "name", "repo"]:
                self._file(query["FilePath"], {})
            case _:
                self._say(404, {}, {"X-Error-Code": "RepoNotFound"})

    def _huggingface_facts(self, revision: str, *, as_tree: bool) -> None:
        hub = self.hub
        if revision not in hub.commits:
            self._say(404, {}, {"X-Error-Code": "RevisionNotFound"})
            return
        siblings: list[dict[str, Any]] = []
        tree: list[dict[str, Any]] = []
        for name in hub.names():
            size, digest = (hub.folder / name).stat().st_size, hub.digest(name)
            sibling = {"rfilename": name, "size": size, "blobId": digest}
            entry = {"type": "file", "path": name, "size": size, "oid": digest}
            if name.endswith(LFS_SUFFIX):
                sibling |= {"blobId": "0" * 40, "lfs": {"sha256": digest, "size": size, "pointerSize": 134}}
                entry |= {"oid": "0" * 40, "lfs": {"oid": digest, "size": size, "pointerSize": 134}}
            siblings.append(sibling)
            tree.append(entry)
        facts = {"id": hub.hub_id, "modelId": hub.hub_id, "sha": hub.commits[revision], "siblings": siblings}
        self._say(200, tree if as_tree else facts)

    def _modelscope_files(self, query: dict[str, str]) -> None:
        hub = self.hub
        if query["Revision"] not in ("master", "v1"):
            self._say(404, {"Code": 10010205001, "Message": "not found", "Success": False})
            return
        files: list[dict[str, Any]] = [{"Name": "onnx", "Path": "onnx", "Type": "tree", "Size": 0, "Sha256": ""}]
        for name in hub.names():
            content = (hub.folder / name).read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            facts = {"Name": name, "Path": name, "Type": "blob", "Size": len(content), "Sha256": digest}
            files.append({**facts, "Revision": "a" * 40})
        self._say(200, {"Code": 200, "Data": {"Files": files}, "Message": "success", "Success": True})

    def _file(self, name: str, headers: dict[str, str]) -> None:
        hub, content = self.hub, self.hub.content(name)
        headers |= {"ETag": f'"{hub.digest(name)}"'}
        wanted = self.headers.get("Range")
        start = 0
        if wanted:
            hub.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if hub.hangs and self.command == "GET":
            hub.hang.wait(PATIENCE)
        cut = hub.cuts.pop(name, None) if self.command == "GET" else None
        self._send(206 if wanted else 200, content[start:], headers, cut)

    def _say(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Ignore errors of clients that closed the connection."""


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.hang.set()
        server.shutdown()
        server.server_close()
        thread.join()
