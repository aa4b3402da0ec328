"""How an engine process ends: it says why, and it is gone."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from pathlib import Path

import pytest

from tests.waiting import PATIENCE
from weft.checkpoint.model_files import ModelFiles
from weft.engine import loop
from weft.engine.process import EngineProcess, run_engine
from weft.engine.wire import Failed, Inbox, Start, frame
from weft.options import Config

NO_MODEL = Start(Config(), ModelFiles(name="none", kind="gguf", path=Path("none.gguf"), weight_files=[]))
HANGS_AT_ITS_END = """
import signal
from weft.engine import process

class Hanging:
    def __del__(self, hang=signal.pause):
        hang()

hanging = Hanging()
process.main()
"""


def test_a_failed_engine_is_gone_though_its_teardown_would_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: undefined symbol')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    engine = EngineProcess(sys.executable, "-c", HANGS_AT_ITS_END)
    try:
        with engine.socket:
            engine.socket.sendall(frame(NO_MODEL))
            assert engine.wait(PATIENCE) == "exit code 1"
    finally:
        engine.kill()
        engine.wait(PATIENCE)


def test_a_failure_is_told_by_its_kind_and_first_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class AcceleratorError(RuntimeError):
        pass

    def faulting(*arguments: object) -> None:
        raise AcceleratorError(
            "CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`."
        )

    monkeypatch.setattr(loop, "serve", faulting)

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        codes: list[int] = []
        thread = threading.Thread(target=lambda: codes.append(run_engine(theirs)))
        thread.start()
        transport, inbox = await asyncio.get_running_loop().create_unix_connection(Inbox, sock=ours)
        transport.write(frame(NO_MODEL))
        told = await inbox.read()
        assert told == Failed("AcceleratorError", "CUDA error: an illegal memory access was encountered")
        await asyncio.to_thread(thread.join, PATIENCE)
        assert codes == [1]
        transport.close()
        theirs.close()

    asyncio.run(scenario())
    assert "TORCH_USE_CUDA_DSA" in caplog.text, "the log has all of it"
