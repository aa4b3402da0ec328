"""Keys from a file: read again when it changes, never lost to a broken one, and known by their owners' names."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.api.clock import Clock
from tests.api.grpc.calls import Client, answer_to, ask, served
from tests.api.http import CHAT, HELLO, request, request_app
from tests.api.scripted_engine import ScriptedEngine, answer
from tests.api.test_server import address_of, process
from tests.waiting import PATIENCE, wait_until
from weft.api.app import build_app
from weft.api.server import check_reach
from weft.config import load
from weft.errors import ConfigError, InvalidRequest
from weft.options import ServerOptions
from weft.serving.auth import POLL_S, Keys


def digest_name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:8]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_lines_with_and_without_names(file: Path) -> None:
    file.write_text("# ours\n\n  team-a: k1\nteam.b k2  \n   # more\nk:3\nteam-a  k4\n")
    keys = Keys(["given"], str(file))
    owners = {key: keys.owner([key]) for key in ("k1", "k2", "k:3", "k4", "given")}
    named = {"k1": "team-a", "k2": "team.b", "k4": "team-a"}
    assert owners == {"k:3": digest_name("k:3"), "given": digest_name("given")} | named
    for wrong in ("", "k", "# ours", "team-a: k1", "team-a:", "team-a"):
        assert keys.owner([wrong]) is None, wrong
    assert keys.owner(["wrong", "k2"]) == "team.b"


def test_a_key_has_a_range_of_priorities(file: Path) -> None:
    file.write_text("batch: k1 priority=2..9\nk2 priority=-5..5\nbatch: k3 priority=2..9\nfree: k4\n")
    keys = Keys([], str(file))

    def given(tenant: str, *asked: int, has_shares: bool = True) -> list[int]:
        return [keys.priority_of(tenant, priority, has_shares=has_shares) for priority in asked]

    assert given("batch", 2, 9, 0) == [2, 9, 2], "nothing said is the nearest to 0"
    assert given(digest_name("k2"), -5, 0, 5) == [-5, 0, 5]
    assert given("free", -(2**31), 7) == [-(2**31), 7]
    for tenant, asked, said in (("batch", 1, "2..9"), ("batch", 10, "2..9"), (digest_name("k2"), 6, "-5..5")):
        with pytest.raises(InvalidRequest, match=said) as refused:
            given(tenant, asked)
        assert refused.value.param == "priority"


def test_an_engine_without_shares_takes_priorities_only_from_keys_with_a_range(file: Path) -> None:
    file.write_text("a: k1 priority=-1..1\nb: k2\n")
    keys, alone = Keys([], str(file)), Keys(["only"])
    assert keys.priority_of("a", -1, has_shares=False) == -1
    assert keys.priority_of("b", 0, has_shares=False) == 0
    with pytest.raises(InvalidRequest, match="--api-key-file"):
        keys.priority_of("b", -1, has_shares=False)
    assert alone.priority_of(digest_name("only"), -1, has_shares=False) == -1, "there is no one to take from"
    assert Keys([]).priority_of("", -1, has_shares=False) == -1


@pytest.mark.parametrize(
    "content",
    [
        "a b c\n",
        "a: k priority=\n",
        "a: k priority=5..-5\n",
        "k priority=1\n",
        "priority=1..2\n",
        "a: good priority=1..2\na: k\n",
        "good\na b c\n",
        "na/me: key\n",
        "same\nsame\n",
        "a: same\nb: same\n",
        b"\xff\xfe",
        "x" * 2**21,
    ],
)
def test_a_broken_file_is_refused_without_telling_a_key(file: Path, content: str | bytes) -> None:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as refused:
        Keys([], str(file))
    assert str(file) in str(refused.value)
    assert not {"good", "same", "b c"} & set(str(refused.value).replace(str(file), "").split())


def test_a_file_that_is_not_there_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Keys([], str(file))


def test_a_file_without_keys_lets_nobody_in(file: Path) -> None:
    file.write_text("# none yet\n")
    config = load({"api_key_file": str(file)}, env={})
    assert request(ScriptedEngine(), "POST", CHAT, config, json=HELLO).status_code == 401


def test_a_file_counts_as_keys_for_an_address_that_others_reach(file: Path) -> None:
    check_reach(ServerOptions(host="0.0.0.0", api_key_file=str(file)))


def test_a_change_is_seen_within_a_second_and_not_looked_for_sooner(file: Path) -> None:
    clock = Clock()
    file.write_text("old")
    keys = Keys([], str(file), clock=clock)
    assert keys.owner(["old"]) is not None
    file.write_text("newer")
    assert keys.owner(["newer"]) is None
    clock.now += POLL_S
    assert keys.owner(["newer"]) is not None
    assert keys.owner(["old"]) is None


def test_a_broken_change_keeps_the_old_keys_and_says_why_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    file.write_text("old")
    keys = Keys([], str(file), clock=clock)
    file.write_text("a b c")
    for _ in range(3):
        clock.now += POLL_S
        assert keys.owner(["old"]) is not None
    with pytest.raises(ConfigError):
        keys.reload()
    file.unlink()
    clock.now += POLL_S
    assert keys.owner(["old"]) is not None
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 2 and "line 1" in said[0] and "No such file" in said[1]
    file.write_text("mended")
    clock.now += POLL_S
    assert keys.owner(["mended"]) is not None and keys.owner(["old"]) is None


def test_the_owner_s_name_reaches_the_engine_over_both_protocols(file: Path) -> None:
    file.write_text("alice: secret-a\nbob: secret-b\n")
    engine = ScriptedEngine(answer("x"))
    app = build_app(engine, load({"api_key_file": str(file)}, env={}))
    for key in ("secret-a", "secret-b"):
        headers = {"authorization": f"Bearer {key}"}
        assert request_app(app, "POST", CHAT, json=HELLO, headers=headers).status_code == 200

    async def scenario() -> None:
        async with served(engine, api_key_file=str(file)) as opened:
            await answer_to(Client(opened.channel, "secret-b"), ask())
            await answer_to(Client(opened.channel, "secret-a"), ask())

    asyncio.run(scenario())
    assert [one.tenant for one in engine.submitted] == ["alice", "bob", "bob", "alice"]


def test_without_keys_nobody_has_a_name() -> None:
    engine = ScriptedEngine(answer("x"))
    request(engine, "POST", CHAT, json=HELLO, headers={"authorization": "Bearer whatever"})
    assert engine.submitted[0].tenant == ""


def test_a_hangup_signal_reads_the_keys_again(file: Path) -> None:
    file.write_text("old-one")
    with process(settings={"api_key_file": str(file)}) as child:
        url = address_of(child)

        def opens(key: str) -> bool:
            return httpx.get(url + "/v1/models", headers={"x-api-key": key}, timeout=PATIENCE).status_code == 200

        assert opens("old-one")
        before = file.stat()
        file.write_text("new-one")
        # Not to be told by its looks: only the signal can have brought it in.
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        child.send_signal(signal.SIGHUP)
        wait_until(lambda: opens("new-one"))
        assert not opens("old-one")
