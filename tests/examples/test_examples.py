"""Every program of examples/ runs against a real server with the default model, and does what it says."""

from __future__ import annotations

import http.server
import os
import queue
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests import forked
from tests.e2e.server import Server
from tests.waiting import PATIENCE
from weft.checkpoint.model_files import ModelFiles

FOLDER = Path(__file__).parents[2] / "examples"
ADMIN = "boss"


@pytest.fixture(scope="module")
def server(smollm2_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("data")
    flags = ("--admin-key", ADMIN, "--adapter-root", tempfile.gettempdir(), "--data-dir", str(data))
    with Server(*flags) as server:
        yield server


def run(server: Server, program: str, *words: str, cwd: Path | None = None) -> str:
    environment = {
        **os.environ,
        "SERVER_URL": server.url,
        "SERVER_GRPC": f"127.0.0.1:{server.grpc_port()}",
        "SERVER_ADMIN_KEY": ADMIN,
        "PYTHONPATH": str(FOLDER.parent),
    }
    done = forked.run(str(FOLDER / program), *words, environment=environment, folder=cwd or FOLDER)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_in_the_table_and_in_a_test() -> None:
    programs = {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".html")}
    assert len(programs) == 10
    table = set(re.findall(r"^\| \[\S+\]\((\S+)\)", (FOLDER / "README.md").read_text(), re.MULTILINE))
    tested = set(re.findall(r'"(\w+\.(?:py|html))"', Path(__file__).read_text()))
    assert programs == table and programs <= tested


def test_chat(server: Server) -> None:
    assert re.search(r"Paris.*\n\d+ tokens in, \d+ out\n$", run(server, "chat.py"), re.DOTALL)
    assert "Berlin" in run(server, "chat.py", "What is the capital of Germany?")


def test_tools(server: Server) -> None:
    call, *answer = run(server, "tools.py").splitlines()
    assert re.fullmatch(r'weather\(\{"city": "(\w+)"\}\) -> It rains in \1, 12 degrees\.', call)
    assert "".join(answer).strip()


def test_structured_output(server: Server) -> None:
    told = run(server, "structured_output.py")
    assert re.fullmatch(r"sentiment='(positive|negative|mixed)' stars=[1-5] words=\[.+\]\n", told)


def test_images(server: Server, tmp_path: Path) -> None:
    told = run(server, "images.py", "a red circle on a blue background", "circle.png", cwd=tmp_path)
    assert "step 1 of " in told and "seed 7 gives it again" in told
    red, _, blue = Image.open(tmp_path / "circle.png").convert("RGB").getpixel((16, 16))
    assert red > blue, "the circle in the middle is red"


def test_search(server: Server) -> None:
    best, *others = run(server, "search.py").splitlines()
    assert len(others) == 4 and re.search("boats|ferry", best)


def test_lora(server: Server) -> None:
    without, changed = (line.partition(":")[2].strip() for line in run(server, "lora.py").splitlines()[:2])
    assert without and changed != without


def test_batch(server: Server, tmp_path: Path) -> None:
    first, *lines = run(server, "batch.py").splitlines()
    assert first == "completed: 3 of 3"
    for capital in ("Paris", "Berlin", "Tokyo"):
        assert any(capital in line for line in lines)
    (tmp_path / "questions.txt").write_text("What is the capital of Spain?\n")
    assert "completed: 1 of 1" in run(server, "batch.py", str(tmp_path / "questions.txt"))


def test_grpc(server: Server) -> None:
    assert re.search(r"\n20 tokens, \d+ tok/s\n$", run(server, "grpc_client.py"))


def test_agent(server: Server) -> None:
    assert re.search(
        r"^multiply\(\{'first': -?\d+, 'second': -?\d+\}\) -> -?\d+$", run(server, "agent.py"), re.MULTILINE
    )


def test_the_page_s_program_streams_in_node(server: Server, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node here")
    (module,) = re.findall(r'<script type="module">\n(.*)</script>', (FOLDER / "browser.html").read_text(), re.DOTALL)
    (tmp_path / "page.mjs").write_text(module)
    program = """
        import { chat } from "./page.mjs";
        const pieces = [];
        const messages = [{role: "user", content: "What is the capital of France?"}];
        for await (const piece of chat(process.argv[2], "none", messages)) pieces.push(piece);
        console.log(pieces.filter(Boolean).length > 1, pieces.join(""));
    """
    (tmp_path / "main.mjs").write_text(program)
    done = subprocess.run(
        [node, tmp_path / "main.mjs", server.url], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.stdout.startswith("true ") and "Paris" in done.stdout, done.stdout + done.stderr


class _Pages(http.server.ThreadingHTTPServer):
    """Serves the page, which asks as soon as it is loaded and sends back what it showed."""

    ASKS = """<script>
        addEventListener("load", () => document.querySelector("form").requestSubmit());
        const shown = document.querySelector("pre");
        new MutationObserver(() => {
          if (shown.dataset.done) fetch("/shown", { method: "POST", body: shown.textContent });
        }).observe(shown, { attributes: true });
    </script>"""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.shown: queue.Queue[str] = queue.Queue()


class _Answer(http.server.BaseHTTPRequestHandler):
    server: _Pages

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write((FOLDER / "browser.html").read_bytes() + _Pages.ASKS.encode())

    def do_POST(self) -> None:
        self.server.shown.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_the_page_streams_in_a_browser(server: Server, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium here")
    with _Pages() as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        address = f"http://127.0.0.1:{pages.server_port}/?server={server.url}"
        browser = subprocess.Popen([chromium, *words, address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert "Paris" in pages.shown.get(timeout=PATIENCE)
        finally:
            browser.terminate()
            browser.wait(PATIENCE)
            pages.shutdown()
