"""The engine process: `python -m weft.engine.process FD`. It serves the api process at the other end of the
socket, dies with it, and tells it why when it cannot go on. `run_engine` is the same for a thread.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback

from weft import logs
from weft.engine.line import Line
from weft.engine.wire import Failed, Start
from weft.errors import WeftError
from weft.hub.memory import as_out_of_memory

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


def run_engine(sock: socket.socket, *, owns_process: bool = False) -> int:
    """Serve one api process; the exit code says whether that went well. An engine that owns its process ends it at
    once when the api process is gone, even in the middle of a step."""
    line = Line(sock)
    if owns_process:
        threading.Thread(target=_leave_when, args=(line.closed,), name="weft-engine-watch", daemon=True).start()
    try:
        start = line.inbox.get()
        if isinstance(start, Start):
            if owns_process:
                logs.set_up(start.config.server.log_level, form=start.config.server.log_format)
            # Only now, and only here, is torch imported: the api process knows this module and stays light.
            from weft.engine.loop import serve

            serve(start, line)
        return 0
    except Exception as error:  # noqa: BLE001 - whatever it is, the api process must hear of it
        told = error if isinstance(error, WeftError) else as_out_of_memory(error)
        if told is not None:
            line.send(Failed(type(told).__name__, told.message, told.hint))
            return 1
        log.error("The engine failed:\n%s", traceback.format_exc())
        # The rest of a CUDA error is advice for those who wrote the kernel; the log has it.
        line.send(Failed(type(error).__name__, next(iter(str(error).splitlines()), "no message")))
        return 1
    finally:
        line.close()


def _leave_when(closed: threading.Event) -> None:
    closed.wait()
    # The main thread may be deep in a step: a moment for an orderly end, then none.
    time.sleep(1.0)
    os._exit(1)


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    logs.set_up("info")
    code = run_engine(socket.socket(fileno=int(sys.argv[1])), owns_process=True)
    logging.shutdown()
    # At once: an orderly end would wait for a GPU that may have faulted, and never answer.
    os._exit(code)


if __name__ == "__main__":
    main()
