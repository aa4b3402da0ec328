"""A machine that fails around the server: its disk is full, its clock jumps, its queue is flooded."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import run_first
from tests.e2e.tiny_server import NAME, TinyServer
from tests.hub.fake_directory import make_directory
from tests.hub.fake_hub import FakeHub, serving
from tests.waiting import PATIENCE, until, wait_until
from weft.compile_cache import VARIABLE

CHAT = {
    "model": NAME, "messages": [{"role": "user", "content": "Sing."}], "seed": 7, "max_tokens": 40, "ignore_eos": True,
}  # fmt: skip


def small_disk(folder: Path, kilobytes: int) -> list[str]:
    """A command that runs another with a disk of this size at the folder, which nobody else sees."""
    mount = f'mount -t tmpfs -o size={kilobytes}k,mode=0700 none "$0" && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(folder)]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    try:
        tried = subprocess.run([*small_disk(folder, 64), "true"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("this machine has no unshare")
    if tried.returncode:
        pytest.skip("this user may not mount a small disk")
    return folder


def fill(disk: Path, process: subprocess.Popen[str]) -> Path:
    """Fill a process's disk to the last byte."""
    filler = Path(f"/proc/{process.pid}/root{disk}/filler")
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1024))
    return filler


def test_a_disk_that_fills_while_a_model_is_pulled_is_named_and_the_next_pull_goes_on(
    disk: Path, tmp_path: Path
) -> None:
    with serving(FakeHub(make_directory(tmp_path / "remote"))) as hub:
        hub.hangs = True
        # A shell stays, so that its disk outlives the pull that fails.
        pull = '"$0" -m weft pull org/name; echo "code $?"'
        process = subprocess.Popen(
            [*small_disk(disk, 4096), "sh", "-c", f"{pull}; read _; {pull}", sys.executable],
            env={**os.environ, "WEFT_HOME": str(disk), "HF_ENDPOINT": hub.url},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with process:
            assert process.stdin is not None and process.stdout is not None
            wait_until(lambda: any("/resolve/" in path for path in hub.asked), "the download has begun")
            filler = fill(disk, process)
            hub.hang.set()
            said = ""
            while "code" not in said:
                said += process.stdout.readline()
            assert "code 1" in said and "No space left on device" in said and "WEFT_HOME" in said, said
            assert "Traceback" not in said
            filler.unlink()
            process.stdin.write("\n")
            process.stdin.flush()
            assert "code 0" in process.stdout.read()


def test_a_disk_without_room_for_compiled_code_costs_time_and_nothing_else(disk: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""
from weft.kernels.cpu.compiled import object_files

print(len(object_files(["weft_dots"])["weft_dots"]) > 500)
""")
    command = [*small_disk(disk, 4), sys.executable, str(program)]
    env = {**os.environ, VARIABLE: str(disk), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
    assert "cannot be kept" in done.stderr and "No space left on device" in done.stderr


CLOCK = """
import time, pathlib
true, off = time.time, pathlib.Path(__file__).with_name("off")
time.time = lambda: true() + float(off.read_text())
"""


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that says how many seconds the server's clock is off."""
    off = tmp_path_factory.mktemp("clock") / "off"
    off.write_text("0")
    return off


def set_clock(clock: Path, seconds: int) -> None:
    """Whole at once: the server reads it at any time."""
    new = clock.with_name("new")
    new.write_text(str(seconds))
    new.replace(clock)


@pytest.fixture(scope="module")
def server(tiny_model: Path, clock: Path) -> Iterator[TinyServer]:
    """A server whose log cannot be written, and whose clock is not to be trusted."""
    flags = (
        "--max-num-seqs",
        "4",
        "--max-queued-requests",
        "16",
        "--heartbeat-timeout-s",
        "3600",
        "--log-level",
        "debug",
    )
    unheard = ["sh", "-c", 'exec "$@" 2>/dev/full', "sh"]
    with TinyServer(tiny_model, *flags, under=unheard, env=run_first(CLOCK, clock.parent)) as server:
        yield server
        server.check_unharmed()


def test_a_log_that_cannot_be_written_hinders_nobody(server: TinyServer) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert client.post("/v1/chat/completions", json={**CHAT, "n": "x"}).status_code == 400
    assert not server.log


def test_a_clock_that_jumps_changes_the_date_and_nothing_else(server: TinyServer, clock: Path) -> None:
    """A day forward and two back, in the midst of a stream and between requests."""
    dates: list[int] = []

    def sing(client: httpx.Client, jump: int | None = None) -> str:
        text = ""
        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    if jump is not None:
                        set_clock(clock, jump)
                    chunk = json.loads(line[6:])
                    dates.append(chunk["created"])
                    text += chunk["choices"][0]["delta"].get("content") or ""
        assert line == "" or line == "data: [DONE]"
        return text

    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        song = sing(client)
        jumps = (86_400, -86_400, 0)
        assert [sing(client, jump) for jump in jumps] == [song] * 3
        server.wait_until_ready()
    assert max(dates) - min(dates) > 86_400, "the clock did not jump"
    assert server.metric("weft_e2e_request_latency_seconds_sum") < PATIENCE


def test_a_queue_flooded_to_ten_times_its_size_answers_what_it_took_and_refuses_the_rest(server: TinyServer) -> None:
    """How long those that it took wait is measured by python -m tests.flood."""
    num_asked = 10 * (4 + 16)

    async def scenario() -> None:
        limits = httpx.Limits(max_connections=num_asked)
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits) as client:
            song = (await client.post("/v1/chat/completions", json=CHAT)).json()["choices"][0]["message"]
            before = server.memory_mb()
            with server.engine_stopped():
                asked = [asyncio.create_task(client.post("/v1/chat/completions", json=CHAT)) for _ in range(num_asked)]
                await until(lambda: sum(task.done() for task in asked) >= num_asked - 2 * (4 + 16), "the refusals")
                assert (await client.get("/health/live")).status_code == 200
            answers = await asyncio.gather(*asked)
        taken = [answer for answer in answers if answer.status_code == 200]
        assert all(answer.json()["choices"][0]["message"] == song for answer in taken)
        assert 16 <= len(taken) <= 2 * (4 + 16)
        for answer in answers:
            if answer.status_code != 200:
                assert (answer.status_code, answer.headers["retry-after"].isdigit()) == (429, True)
        after = server.memory_mb()
        assert all(after[name] < before[name] + 30 for name in before), f"{before} MB, then {after} MB"

    asyncio.run(scenario())
