"""llama.cpp's own tests of its server, run against Weft: `make show-llamacpp-tests`.

`--tests` is the folder tools/server/tests of llama.cpp's sources, `--python` an environment with what they import. They
are told that the server runs already, so that what they would start it with is not used: one server of a tiny random
model answers them all. A forwarder stands between, for llama.cpp takes paths without /v1 and any model's name. It fails
when a test fails that is not among the expected differences, or one of these passes or does not run.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree

import httpx

from tests import tiny_models
from tests.ports import reserved_port
from tests.waiting import PATIENCE, wait_until

FILES = ("test_chat_completion.py", "test_compat_anthropic.py", "test_compat_oai_responses.py")
"""Those of OpenAI's and Anthropic's interfaces."""
TIMEOUT_S = 60
NAME = "tinyllama-2"
CONTEXT = 2048
"""Tokens: enough for a template's words on tools, and less than the prompts that are meant to be too long."""
TEMPLATE = "../../../models/templates/Qwen-Qwen3-0.6B.jinja"
"""The one that tests of thoughts in a conversation ask for."""

_CHAT, _ANTHROPIC, _RESPONSES = (f"{name.removesuffix('.py')}::test_" for name in FILES)
_MODEL = "it wants the text, the tokens or the template of llama.cpp's own model"
_NAME = "system_fingerprint names Weft, and no build of llama.cpp"
_DEBUG = "__verbose, llama.cpp's report of the prompt, is not written"
_PROGRESS = "a prompt's progress and timings per token are hints: they are not told"
_IMAGE = "an image is refused with 400, and not 500"
_THINKING = "it wants a model that thinks, and the tiny one does not"
_ERROR = "the error's type is OpenAI's, invalid_request_error"
_FIRST = 'the first delta has the content "", as OpenAI\'s, and not null'
DIFFERENCES = {
    f"{_CHAT}chat_completion": _NAME,
    f"{_CHAT}chat_completion_cached_tokens": _MODEL,
    f"{_CHAT}chat_completion_stream": _FIRST,
    f"{_CHAT}chat_completion_with_openai_library": _NAME,
    f"{_CHAT}chat_template": _DEBUG,
    f"{_CHAT}chat_template_assistant_prefill": _DEBUG,
    f"{_CHAT}chat_template_continue_final_message_vllm_compat": _DEBUG,
    f"{_CHAT}verbose_debug": _DEBUG,
    f"{_CHAT}apply_chat_template": _MODEL,
    f"{_CHAT}chat_completion_with_timings_per_token": _PROGRESS,
    f"{_CHAT}return_progress": _PROGRESS,
    f"{_CHAT}invalid_chat_completion_req[messages7]": "two answers in a row are the template's to refuse",
    f"{_CHAT}logprobs_stream": _FIRST,
    f"{_CHAT}context_size_exceeded": _ERROR,
    f"{_CHAT}context_size_exceeded_stream": _ERROR,
    f"{_ANTHROPIC}anthropic_tool_result_with_image": _IMAGE,
    f"{_ANTHROPIC}anthropic_vision_format_accepted": _IMAGE,
    f"{_ANTHROPIC}anthropic_vision_base64_with_multimodal_model": "it downloads a picture for a model that sees",
    f"{_ANTHROPIC}anthropic_empty_messages": "a conversation without messages is refused, as by Anthropic",
    f"{_ANTHROPIC}anthropic_thinking_with_reasoning_model": _THINKING,
    f"{_RESPONSES}responses_with_openai_library": _MODEL,
    f"{_RESPONSES}responses_stream_with_llama_telemetry": _PROGRESS,
}
"""Expected failures, by a test's id with or without its parameters, and why."""


class Forwarder(BaseHTTPRequestHandler):
    """Passes requests on to `target`, a port, by Weft's paths and with the name of its model."""

    target = 0

    def do_GET(self) -> None:
        self._forward(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with contextlib.suppress(ValueError):
            asked = json.loads(body)
            if isinstance(asked, dict):
                body = json.dumps(asked | {"model": NAME}).encode()
        self._forward(body)

    def _forward(self, body: bytes | None) -> None:
        path = f"/v1{self.path}" if self.path.startswith(("/chat/completions", "/responses")) else self.path
        kept = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "content-length")}
        connection = http.client.HTTPConnection("127.0.0.1", self.target)
        connection.request(self.command, path, body, kept)
        answer = connection.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        self.end_headers()
        # A test that has seen enough hangs up.
        with contextlib.suppress(ConnectionError):
            while piece := answer.read1():
                self.wfile.write(piece)
        connection.close()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a line for every request would hide the results."""


@contextlib.contextmanager
def forwarded(target: int) -> Iterator[int]:
    """Run a forwarder; its port."""
    handler = type("ForwarderTo", (Forwarder,), {"target": target})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def saved_model(folder: Path, template: str) -> Path:
    """Save a tiny model that always chooses the likeliest token, whatever the temperature: no test passes by chance."""
    tiny_models.save_directory("qwen3", folder)
    (folder / "chat_template.jinja").write_text(template)
    for name, setting in ("config", {"max_position_embeddings": CONTEXT}), ("generation_config", {"top_k": 1}):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | setting))
    return folder


def outcomes(report: Path) -> Iterator[tuple[str, str]]:
    """Yield every test's id, and the first line of its failure; empty: it passed. Those that skip themselves are not
    among them."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("skipped") is None:
            failure = next((found for kind in ("failure", "error") for found in case.iterfind(kind)), None)
            first_line = "" if failure is None else (failure.get("message") or "failed").split("\n")[0]
            yield f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}", first_line


def told(results: Iterable[tuple[str, str]], differences: Mapping[str, str] = DIFFERENCES) -> int:
    """Print what passed, what was expected to differ and what was not; return the exit status."""
    passed, expected, wrong = 0, 0, 0
    unseen = set(differences)
    for test, failure in results:
        listed = test if test in differences else test.partition("[")[0]
        reason = differences.get(listed)
        unseen.discard(listed)
        if failure and reason:
            expected += 1
            print(f"differs  {test}: {reason}")
        elif failure:
            wrong += 1
            print(f"FAILED   {test}: {failure[:200]}")
        else:
            passed += 1
            if reason:
                wrong += 1
                print(f"PASSED   {test}, which was expected to differ: {reason}")
    for test in sorted(unseen):
        wrong += 1
        print(f"NOT RUN  {test}, which was expected to differ: {differences[test]}")
    print(f"{passed} passed, {expected} differ as expected, {wrong} are not as expected")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", type=Path, required=True)
    parser.add_argument("--python", type=Path, default=sys.executable, help="Has what the tests import.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
        model = saved_model(Path(folder) / "model", (options.tests / TEMPLATE).read_text())
        words = ["serve", "--model", str(model), "--served-model-name", NAME, "--port", str(port)]
        server = subprocess.Popen(
            [sys.executable, "-m", "weft", *words, "--compat-api", "llamacpp"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: _is_up(port), "the server's start")
            report = Path(folder) / "report.xml"
            # Not resolved: the interpreter of an environment is a link.
            python = options.python.absolute()
            command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}"]
            with forwarded(port) as between:
                subprocess.run(
                    [*command, f"--junitxml={report}", *(f"unit/{name}" for name in FILES)],
                    cwd=options.tests,
                    env={**os.environ, "DEBUG_EXTERNAL": "1", "PORT": str(between)},
                    stdout=subprocess.DEVNULL,
                    check=False,
                )
            return told(outcomes(report))
        finally:
            server.terminate()
            server.wait()


def _is_up(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE).status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    sys.exit(main())
