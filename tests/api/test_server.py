"""A server process from its first line to its last."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests import forked
from tests.api.http import COMPLETIONS, PROMPT
from tests.ports import reserved_port
from tests.waiting import PATIENCE, wait_until
from weft.api.listening import bind
from weft.errors import ConfigError


@contextlib.contextmanager
def process(**options: Any) -> Iterator[Any]:
    with forked.start("tests.api.serve_scripted", [msgspec.json.encode(options).decode()], os.environ) as child:
        try:
            yield child
        finally:
            child.kill()


def address_of(child: Any) -> str:
    line = child.stdout.readline()
    found = re.fullmatch(r"Weft serves scripted at (https?://127\.0\.0\.1:\d+) \(ready in \d+\.\d s\)\n", line)
    assert found, line
    return found[1]


class Ask(threading.Thread):
    """A streamed request, under way."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.text = ""
        self.start()
        wait_until(lambda: "begun" in self.text)

    def run(self) -> None:
        with httpx.stream("POST", self.url + COMPLETIONS, json=PROMPT | {"stream": True}, timeout=PATIENCE) as response:
            for text in response.iter_text():
                self.text += text


def is_up(url: str) -> bool:
    with contextlib.suppress(httpx.ConnectError):
        return httpx.get(f"{url}/health/live", timeout=PATIENCE).status_code == 200
    return False


def test_it_answers_while_the_engine_starts(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with reserved_port() as port, process(start_when=str(go), settings={"port": port}) as child:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_up(url))
        health = httpx.get(f"{url}/health", timeout=PATIENCE)
        assert health.status_code == 503
        assert "starting" in health.text
        assert httpx.post(url + COMPLETIONS, json=PROMPT, timeout=PATIENCE).status_code == 503
        go.touch()
        assert address_of(child) == url
        assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200


def test_a_signal_drains_and_ends_with_0(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with process(answer_when=str(go)) as child:
        url = address_of(child)
        ask = Ask(url)
        child.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 503)
        assert "draining" in httpx.get(f"{url}/health", timeout=PATIENCE).text
        assert httpx.post(url + COMPLETIONS, json=PROMPT, timeout=PATIENCE).status_code == 503
        go.touch()
        ask.join()
        assert "done" in ask.text and ask.text.endswith("data: [DONE]\n\n")
        output, _ = child.communicate(timeout=PATIENCE)
        assert (child.returncode, output) == (0, "engine closed\n")


def test_what_outlasts_the_drain_is_ended(tmp_path: Path) -> None:
    with process(answer_when=str(tmp_path / "never"), settings={"drain_timeout_s": 0.2}) as child:
        ask = Ask(address_of(child))
        child.send_signal(signal.SIGTERM)
        ask.join()
        assert "shutting down" in ask.text and ask.text.endswith("data: [DONE]\n\n")
        assert child.wait(timeout=PATIENCE) == 0


def test_without_an_engine_the_server_tells_its_clients_and_ends_with_1(tmp_path: Path) -> None:
    died = tmp_path / "died"
    with process(failed_while=str(died)) as child:
        ask = Ask(address_of(child))
        died.touch()
        ask.join()
        assert "There is no engine any more" in ask.text and ask.text.endswith("data: [DONE]\n\n")
        output, errors = child.communicate(timeout=PATIENCE)
        assert (child.returncode, output) == (1, "engine closed\n")
        assert "--keep-serving-without-engine" in errors


def test_a_server_that_is_to_go_on_without_an_engine_starts_another(tmp_path: Path) -> None:
    died = tmp_path / "died"
    with process(failed_while=str(died), backoff_s=0.5, settings={"keep_serving_without_engine": True}) as child:
        url = address_of(child)
        died.touch()
        assert child.stdout.readline() == "engine closed\n"
        health = httpx.get(f"{url}/health", timeout=PATIENCE)
        assert health.status_code == 503 and "given up" in health.text
        refused = httpx.post(url + COMPLETIONS, json=PROMPT, timeout=PATIENCE)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        died.unlink()
        wait_until(lambda: httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200, "another engine")


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with process(answer_when=str(tmp_path / "never")) as child:
        url = address_of(child)
        ask = Ask(url)
        child.send_signal(signal.SIGINT)
        wait_until(lambda: httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 503)
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=PATIENCE) == 0
        ask.join()
        assert "shutting down" in ask.text


def test_a_signal_while_the_engine_starts_ends_with_0(tmp_path: Path) -> None:
    never = str(tmp_path / "never")
    with reserved_port() as port, process(start_when=never, settings={"port": port}) as child:
        wait_until(lambda: is_up(f"http://127.0.0.1:{port}"))
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=PATIENCE) == 0


def test_an_engine_that_does_not_start_is_explained() -> None:
    with process(start_error="The file is damaged.") as child:
        _, errors = child.communicate(timeout=PATIENCE)
        assert child.returncode == 1
        assert errors == "The file is damaged. Try another.\n"


def test_a_port_in_use_is_explained() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as refused:
        bind("127.0.0.1", taken.getsockname()[1])
    assert "--port" in refused.value.hint


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_of_another_machine_is_explained(host: str) -> None:
    with pytest.raises(ConfigError) as refused:
        bind(host, 0)
    assert host in refused.value.message
