"""`weft chat` and `weft run` in a real terminal and in pipes, with the default model of a real server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.e2e.conftest import SECRETS
from tests.e2e.server import Server
from tests.ports import reserved_port
from tests.pty_session import ALT_ENTER, CTRL_C, CTRL_D, ENTER, ESCAPES, LEFT, UP, PtySession, pasted
from tests.waiting import wait_until
from weft.checkpoint.model_files import ModelFiles, home

FRANCE, PARIS = "What is the capital of France?", "The capital of France is Paris."
STORY = "Write a long story about a dragon and a knight."
KEY = SECRETS["WEFT_API_KEY"]


@pytest.fixture
def server(locked: Server) -> Server:
    return locked


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A home of its own for the history, with the models that are here."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "models").symlink_to(home() / "models")
    return {"WEFT_HOME": str(tmp_path / "home"), "WEFT_API_KEY": KEY}


@pytest.fixture
def chat(server: Server, environment: dict[str, str], tmp_path: Path) -> Iterator[PtySession]:
    with talk(server, environment, tmp_path) as session:
        session.expect_prompt(1)
        yield session


def talk(server: Server, environment: Mapping[str, str], folder: Path, *words: str, **how: Any) -> PtySession:
    flags = ("--url", server.url, "--temperature", "0", "--max-tokens", "40", *words)
    return PtySession("chat", *flags, env=environment, cwd=folder, **how)


def piped(*words: str, text: str | None, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command whose standard input is this text, or empty, and whose output is no terminal."""
    with tempfile.NamedTemporaryFile("w") as stdin:
        stdin.write(text or "")
        stdin.flush()
        return forked.weft(*words, environment={**os.environ, **env}, stdin=Path(stdin.name))


def running(server: Server) -> float:
    return server.metric("weft_num_requests_running")


def test_a_line_is_edited_answered_and_measured(chat: PtySession, server: Server) -> None:
    assert f"smollm2 at {server.url}. /help lists the commands." in chat.text
    chat.send("What is the capital of Frunce?" + LEFT * 4 + "\x7fa" + ENTER)
    chat.expect(PARIS)
    chat.expect("tok/s")
    assert re.search(r"\d+ tokens, [\d.]+ tok/s, TTFT \d+ ms\n", chat.text)
    chat.expect_prompt(2)
    # What was sent before is a key away, and Ctrl-D ends the chat.
    chat.send(UP + ENTER)
    chat.expect("tok/s", 2)
    chat.expect_prompt(3)
    chat.send(CTRL_D)
    assert chat.end() == 0
    assert KEY not in chat.text


def test_several_lines_are_one_message(chat: PtySession, tmp_path: Path) -> None:
    chat.send(pasted("first line\nsecond line") + ENTER)
    chat.expect("tok/s")
    chat.expect_prompt(2)
    chat.send("third" + ALT_ENTER + "fourth\\" + ENTER + "fifth" + ENTER)
    chat.expect("tok/s", 2)
    chat.expect_prompt(3)
    chat.send("/save saved.json" + ENTER)
    chat.expect("saved.json: 4 messages")
    messages = json.loads((tmp_path / "saved.json").read_text())["messages"]
    assert [turn["content"] for turn in messages[::2]] == ["first line\nsecond line", "third\nfourth\nfifth"]


def test_ctrl_c_stops_the_answer_and_a_second_one_leaves(chat: PtySession, server: Server) -> None:
    chat.send("/set max_tokens 4000" + ENTER)
    chat.expect_prompt(2)
    chat.send(STORY + ENTER)
    wait_until(lambda: running(server) == 1, "an answer")
    chat.expect(STORY)
    shown = len(chat.text)
    wait_until(lambda: len(chat.text) > shown + 200, "a part of the answer")
    chat.send(CTRL_C)
    chat.expect("Stopped. Ctrl-C again leaves.")
    wait_until(lambda: running(server) == 0, "the end of the request")
    chat.expect_prompt(3)
    # A message between them: the next one stops again, and does not leave.
    chat.send("/stats" + ENTER)
    chat.expect("tokens answered")
    chat.expect_prompt(4)
    chat.send("half a message" + CTRL_C + CTRL_C)
    chat.expect("Ctrl-C again, Ctrl-D or /exit leaves.")
    chat.expect_prompt(5)
    chat.send(CTRL_C)
    assert chat.end() == 0
    assert "Traceback" not in chat.text


def test_the_commands(chat: PtySession, tmp_path: Path) -> None:
    said = {
        "/help": "/system [TEXT]",
        "/system Answer in French.": "The system message: Answer in French.",
        "/system none": "There is no system message.",
        "/set temperature 7x": "temperature must be a number, not '7x'.",
        "/set temperature -1": "temperature",
        "/set nothing 1": "There is no setting 'nothing'.",
        "/set top_p 0.5": "",
        "/set": "top_p               0.5",
        "/stats": "There is no answer yet.",
        "/model": "smollm2",
        "/model other": "has no model 'other'; it has smollm2",
        "/load nowhere.json": "nowhere.json: No such file or directory.",
        "/nonsense": "There is no command /nonsense.",
        "/image a red circle on a blue background": "image-1.png: ",
        "/exit": "",
    }
    for number, (command, answer) in enumerate(said.items(), 1):
        chat.expect_prompt(number)
        chat.send(command + ENTER)
        chat.expect(answer)
    assert chat.end() == 0
    assert (tmp_path / "image-1.png").read_bytes().startswith(b"\x89PNG")


def test_a_saved_conversation_goes_on_and_clear_forgets_it(chat: PtySession, tmp_path: Path) -> None:
    saved = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": FRANCE}]
    (tmp_path / "chat.json").write_text(json.dumps({"messages": [*saved, {"role": "assistant", "content": PARIS}]}))
    chat.send("/load chat.json" + ENTER)
    chat.expect("chat.json: 3 messages")
    chat.expect_prompt(2)
    chat.send("/save copy.json" + ENTER)
    chat.expect("copy.json: 3 messages")
    chat.expect_prompt(3)
    chat.send("/clear" + ENTER)
    chat.expect_prompt(4)
    chat.send("/save cleared.json" + ENTER)
    chat.expect("cleared.json: 1 messages")
    assert json.loads((tmp_path / "copy.json").read_text())["messages"][:2] == saved
    assert json.loads((tmp_path / "cleared.json").read_text())["messages"] == saved[:1]


def test_the_answer_is_wrapped_at_words(server: Server, environment: dict[str, str], tmp_path: Path) -> None:
    with talk(server, environment | {"NO_COLOR": "1"}, tmp_path, columns=30) as chat:
        chat.expect_prompt(1)
        chat.send("/set max_tokens 60" + ENTER)
        chat.expect_prompt(2)
        before = len(chat.raw)
        chat.send("Tell me about the sea." + ENTER)
        chat.expect("tok/s")
        # The answer is laid out again as it grows: after a sequence or a carriage return another line is written.
        answer = ESCAPES.sub("\n", chat.raw[before:].rpartition("tokens,")[0])
        lines = answer.replace("\r", "\n").splitlines()
        assert not [line for line in lines if len(line.rstrip()) > 30]
        assert sum(len(line.split()) for line in lines) > 20
        # No colour: neither of the foreground nor of the background.
        assert not re.search(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7])[;m]", chat.raw)


def test_answers_can_be_redirected_while_the_line_is_edited(
    server: Server, environment: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "answers.txt"
    with output.open("wb") as file, talk(server, environment, tmp_path, stdout=file) as chat:
        chat.expect_prompt(1)
        chat.send(FRANCE + ENTER)
        chat.expect("tok/s")
        chat.expect_prompt(2)
        chat.send(CTRL_D)
        assert chat.end() == 0
    assert output.read_text() == f"{PARIS}\n"


def test_messages_are_kept_for_the_next_chat(server: Server, environment: dict[str, str], tmp_path: Path) -> None:
    history = tmp_path / "home" / "chat_history"
    with talk(server, environment, tmp_path, "--no-history") as chat:
        chat.expect_prompt(1)
        chat.send("/clear" + ENTER)
        chat.expect_prompt(2)
    assert not history.exists()
    with talk(server, environment, tmp_path) as chat:
        chat.expect_prompt(1)
        chat.send("/set seed 12345" + ENTER)
        chat.expect_prompt(2)
    assert "/set seed 12345" in history.read_text() and history.stat().st_mode & 0o777 == 0o600
    with talk(server, environment, tmp_path) as chat:
        chat.expect_prompt(1)
        chat.send(UP + ENTER)
        chat.expect("/set seed 12345")


def test_a_wrong_key_is_two_lines_and_is_not_repeated(server: Server, environment: dict[str, str]) -> None:
    words = ("chat", "--url", server.url, "--api-key", "wrong-sesame")
    done = piped(*words, text="hi", env=environment)
    assert done.returncode == 2 and done.stdout == ""
    assert "wants another API key" in done.stderr and "--api-key" in done.stderr
    assert "sesame" not in done.stderr


def test_piped_text_is_one_message_and_the_answer_is_all_that_comes(
    server: Server, environment: dict[str, str]
) -> None:
    words = ("chat", "--url", server.url, "--temperature", "0", "--max-tokens", "40")
    done = piped(*words, text=f"{FRANCE}\n", env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{PARIS}\n", "")
    done = piped("run", "smollm2", FRANCE, *words[1:], text=None, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{PARIS}\n", "")
    done = piped(*words, text="", env=environment)
    assert done.returncode == 2 and "no message on standard input" in done.stderr


@contextmanager
def scripted_server(**settings: Any) -> Iterator[int]:
    """A server of Weft over an engine that says what it is told to; its port."""
    options = json.dumps({"settings": settings})
    with forked.start("tests.api.serve_scripted", [options], os.environ) as process:
        try:
            assert process.stdout is not None
            found = re.search(r":(\d+) ", process.stdout.readline())
            assert found is not None
            yield int(found[1])
        finally:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)


def test_a_server_that_runs_is_used_and_named(environment: dict[str, str], tmp_path: Path) -> None:
    with (
        scripted_server() as port,
        PtySession("chat", env=environment | {"WEFT_PORT": str(port)}, cwd=tmp_path) as chat,
    ):
        chat.expect(f"Using the server at http://127.0.0.1:{port}; --no-attach loads the model here.")
        chat.expect_prompt(1)
        chat.send("hi" + ENTER)
        chat.expect("begundone")
        chat.expect_prompt(2)
        chat.send("/exit" + ENTER)
        assert chat.end() == 0
        # The same in a pipe, without a word about it.
        done = piped("chat", text="hi", env=environment | {"WEFT_PORT": str(port)})
        assert (done.stdout, done.stderr) == ("begundone\n", "")


def test_a_server_without_the_model_or_with_a_key_is_told_and_not_used(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with scripted_server() as port, scripted_server(api_key=["k"]) as locked_port:
        for number, told in ((port, ", and not ./none.gguf."), (locked_port, "wants a key: --url http://127.0.0.1:")):
            place = environment | {"WEFT_PORT": str(number), "COLUMNS": "200"}
            with PtySession("chat", "./none.gguf", env=place, cwd=tmp_path, columns=200) as chat:
                chat.expect(told)
                chat.expect("Loading ./none.gguf.")
                chat.expect("no such file")
                assert chat.end() == 1


def test_without_a_server_the_model_is_loaded_and_ctrl_c_stops_it(
    smollm2_files: ModelFiles, environment: dict[str, str], tmp_path: Path
) -> None:
    with (
        reserved_port() as port,
        PtySession(
            "run",
            "--threads",
            "1",
            "--max-tokens",
            "400",
            env=environment | {"WEFT_PORT": str(port)},
            cwd=tmp_path,
            is_fork=False,
        ) as chat,  # fmt: skip
    ):
        chat.expect("Loading smollm2.")
        chat.expect_prompt(1)
        chat.send(STORY + ENTER)
        chat.expect(STORY)
        shown = len(chat.text)
        wait_until(lambda: len(chat.text) > shown + 200, "a part of the answer")
        chat.send(CTRL_C)
        chat.expect("Stopped. Ctrl-C again leaves.")
        chat.expect_prompt(2)
        chat.send(FRANCE + ENTER)
        chat.expect("tok/s")
        chat.expect_prompt(3)
        chat.send(CTRL_C)
        chat.expect("Ctrl-C again, Ctrl-D or /exit leaves.")
        chat.expect_prompt(4)
        chat.send(CTRL_C)
        assert chat.end() == 0


def test_a_server_that_is_not_there_is_named(environment: dict[str, str]) -> None:
    with reserved_port() as port:
        done = piped("chat", "--url", f"127.0.0.1:{port}", text="hi", env=environment)
    assert done.returncode == 1
    assert f"The server at http://127.0.0.1:{port} cannot be reached" in done.stderr
    assert piped("chat", "--url", "http://:pass@host", text="hi", env=environment).returncode == 2
