"""The fork server and the engine processes that are forked from it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.test_process import NO_MODEL
from tests.waiting import PATIENCE, wait_until
from weft import switches
from weft.engine import fork_server, process
from weft.engine.fork_server import ForkCommand, ForkedEngine, ForkServer
from weft.engine.process import EngineProcess, engine_environment, launch_engine
from weft.engine.wire import frame

WAITS = ForkCommand("tests.engine.waiting_engine")


@pytest.fixture
def lasting() -> ForkServer:
    """The worker's own, for tests that leave it running."""
    server = fork_server.shared_fork_server(engine_environment())
    assert server is not None
    return server


@pytest.fixture
def light(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch cannot be imported, which takes no time: engines that need none are forked."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: undefined symbol')")
    return engine_environment() | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}


def pid_of(engine: ForkedEngine) -> int:
    wait_until(lambda: engine.pid is not None, "the process id")
    assert engine.pid is not None
    return engine.pid


def status(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(name))


def has_ended(pid: int) -> bool:
    try:
        return status(pid, "State").startswith("Z")
    except FileNotFoundError:
        return True


def test_an_engine_is_forked_named_killed_and_reaped(lasting: ForkServer) -> None:
    first, second = lasting.fork(WAITS), lasting.fork(WAITS)
    with first.socket, second.socket:
        pid = pid_of(first)
        wait_until(lambda: Path(f"/proc/{pid}/comm").read_text() == "weft-engine\n", "its name")
        assert first.wait(0) is None
        first.kill()
        assert first.wait(PATIENCE) == "killed by SIGKILL"
        assert not Path(f"/proc/{pid}").exists(), "no zombie stays"
        first.kill()  # of what has ended: nothing
        assert first.wait(0) == "killed by SIGKILL"
        assert second.wait(0) is None and not has_ended(pid_of(second)), "the other lives"
        os.kill(pid_of(second), signal.SIGTERM)
        assert second.wait(PATIENCE) == "killed by SIGTERM"


def test_a_process_of_a_thousand_connections_hears_of_its_engine(lasting: ForkServer) -> None:
    """Numbers of files above 1023 are beyond `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    taken = [os.dup(0) for _ in range(1024)]
    engine = lasting.fork(WAITS)
    try:
        with engine.socket:
            assert engine._control.fileno() > 1023
            pid_of(engine)
            engine.kill()
            assert engine.wait(PATIENCE) == "killed by SIGKILL"
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_owner_that_never_listened_harms_no_other_engine(lasting: ForkServer) -> None:
    """It leaves with the process id unread, which resets the connection."""
    lost, kept = lasting.fork(WAITS), lasting.fork(WAITS)
    with kept.socket:
        pid_of(kept)
        lost.close()
        kept.kill()
        assert kept.wait(PATIENCE) == "killed by SIGKILL"
        assert lasting.is_alive


def test_it_is_killed_though_the_server_has_not_forked_it_yet(light: dict[str, str]) -> None:
    server = ForkServer(light)
    server._process.send_signal(signal.SIGSTOP)
    engine = server.fork(WAITS)
    with engine.socket:
        engine.kill()
        server._process.send_signal(signal.SIGCONT)
        assert engine.wait(PATIENCE) == "killed by SIGKILL"
    server.close()


def test_engines_end_with_their_server_and_the_next_has_a_new_one(light: dict[str, str]) -> None:
    """So does one that the server was told to kill and has not."""
    server = ForkServer(light)
    engine, told = server.fork(WAITS), server.fork(WAITS)
    with engine.socket, told.socket:
        pids = [pid_of(engine), pid_of(told)]
        server._process.send_signal(signal.SIGSTOP)
        told.kill()
        server._process.kill()
        assert [one.wait(PATIENCE) for one in (engine, told)] == 2 * ["ended with its fork server"]
        wait_until(lambda: all(map(has_ended, pids)), "the engines' end")
    wait_until(lambda: not server.is_alive, "the server's end")
    with pytest.raises(OSError):
        server.fork(WAITS)
    server.close()


def test_an_engine_whose_server_ended_before_it_could_notice_ends_at_once() -> None:
    command = ForkCommand("no_such_module")
    script = f"from weft.engine.fork_server import ForkCommand, _run; _run({command!r}, 0, [], server_pid=-1)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_server_that_has_forked_nothing_is_not_waited_for() -> None:
    """It may be importing, and would hear of its end seconds later."""
    server = ForkServer(engine_environment())
    server.close()
    assert server._process.returncode == -signal.SIGKILL


def test_the_shared_server_is_started_again_when_it_has_died(
    light: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "_shared", None)
    server = fork_server.shared_fork_server(light)
    assert server is not None and server is fork_server.shared_fork_server(light)
    server.close()
    again = fork_server.shared_fork_server(light)
    assert again is not None and again is not server and again.is_alive
    again.close()


def test_an_engine_that_fails_says_how_it_ended(lasting: ForkServer) -> None:
    engine = lasting.fork(ForkCommand(process.__name__))
    with engine.socket:
        engine.socket.sendall(frame(NO_MODEL))
        assert engine.wait(PATIENCE) == "exit code 1"
    missing = lasting.fork(ForkCommand("tests.engine.no_such_module"))
    with missing.socket:
        assert missing.wait(PATIENCE) == "exit code 1"


def test_another_environment_or_folder_has_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def launched() -> type:
        engine = launch_engine("tests.engine.waiting_engine")
        with engine.socket:
            engine.kill()
            assert engine.wait(PATIENCE) == "killed by SIGKILL"
        return type(engine)

    assert launched() is ForkedEngine
    with monkeypatch.context() as changed:
        changed.setenv("OMP_NUM_THREADS", "3")
        assert launched() is EngineProcess
    # There, too, the process must find what it runs: it would else end by itself, unless it is killed before.
    (tmp_path / "tests").symlink_to(Path(__file__).parent.parent)
    with monkeypatch.context() as changed:
        changed.chdir(tmp_path)
        assert launched() is EngineProcess
    assert launched() is ForkedEngine


def test_what_an_engine_leaves_behind_is_the_fork_server_s_to_wait_for(lasting: ForkServer) -> None:
    """As the ranks of an engine that was killed: process 1 of a container may wait for none, and they stay for good."""
    engine = lasting.fork(ForkCommand("tests.engine.orphaning_engine"))
    with engine.socket:
        left, server = map(int, engine.socket.recv(64).split())
        assert engine.wait(PATIENCE) == "exit code 0"
    assert int(status(left, "PPid")) == server
    os.kill(left, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{left}").exists(), "its end")


def test_other_switches_need_no_other_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in ("gemv,graphs", ""):
        monkeypatch.setenv(switches.VARIABLE, names)
        engine = launch_engine("tests.engine.telling_engine")
        with engine.socket, engine.socket.makefile() as told:
            assert isinstance(engine, ForkedEngine) and told.read() == names
            assert engine.wait(PATIENCE) == "exit code 0"


def test_an_engine_gets_what_it_needs_of_the_environment_and_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    for name in (
        "WEFT_API_KEY",
        "WEFT_ENGINE_API_KEY",
        "HF_TOKEN",
        "OPENAI_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "NVIDIA_API_KEY",
    ):
        monkeypatch.setenv(name, "a secret")
    assert "a secret" not in engine_environment().values()
    assert engine_environment()["CUDA_VISIBLE_DEVICES"] == "3"
    assert engine_environment()["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize("how", ["one by one", "all at once", "outlines"])
def test_modules_of_torch_that_no_engine_uses_are_imported_when_they_are_used(
    how: str, lasting: ForkServer, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = lasting.fork(ForkCommand("tests.engine.deferred_modules", (how,)))
    with engine.socket:
        assert engine.wait(PATIENCE) == "exit code 0", capfd.readouterr().err
