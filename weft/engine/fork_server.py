"""The fork server is a process in which torch and the kernels are imported; engine processes are forked from it.

Imports take seconds and a fork milliseconds: the engine that replaces a dead one is back as soon as its weights are
read. The server computes nothing and touches no GPU, so a fork of it is as good as a new process. It ends with the
process that started it, and its engines end with it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import msgspec
from msgspec import Struct

from weft import switches
from weft.engine.child_process import adopt_orphans, end_with_parent, exit_text, name_process

ENGINE_NAME = b"weft-engine"
"""The name of a forked engine in `ps -o comm` and `top`: its command line is the server's."""
MAX_MESSAGE_BYTES = 64 * 1024
KILL = b"kill"


class ForkCommand(Struct, frozen=True):
    """Asks for a process that runs `module.main()` with `sys.argv[1:]` of the arguments and the number of the engine's
    socket. With it come that socket, the server's end of the control socket, stdout and stderr."""

    module: str
    arguments: tuple[str, ...] = ()
    switched_off: str = ""
    """The engine's WEFT_WITHOUT, which no module reads while it is imported."""


class ForkServer:
    """The fork server as the process that started it sees it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._reads_at_import = (_read_at_import(environment), Path.cwd())
        self._has_forked = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weft.engine.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                # What a terminal sends to all (Ctrl-C) is the api process's to hear.
                start_new_session=True,
            )
        atexit.register(self.close)

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Modules read the environment and the working directory while they are imported: a fork has the server's."""
        return self._reads_at_import == (_read_at_import(environment), Path.cwd())

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, command: ForkCommand) -> ForkedEngine:
        """Ask for an engine process, and return at once: the server may be importing yet. Raises OSError when it is
        gone."""
        engine = ForkedEngine()
        self._has_forked = True
        with engine.theirs, engine.control_theirs:
            fds = [engine.theirs.fileno(), engine.control_theirs.fileno(), 1, 2]
            try:
                socket.send_fds(self._socket, [msgspec.json.encode(command)], fds)
            except OSError:
                engine.close()
                raise
        return engine

    def close(self) -> None:
        atexit.unregister(self.close)
        self._socket.close()
        if not self._has_forked:
            self._process.kill()  # it may be importing yet, and would not hear
        self._process.wait()


class ForkedEngine:
    """An engine process that the server has forked or is about to fork."""

    def __init__(self) -> None:
        self.socket, self.theirs = socket.socketpair()
        self._control, self.control_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid: int | None = None
        self._end: str | None = None

    @property
    def pid(self) -> int | None:
        """The process's id; None while the server is importing."""
        if self._pid is None:
            self._hear(timeout_s=0)
        return self._pid

    def kill(self) -> None:
        # The server knows whether the process id is still this engine's.
        with contextlib.suppress(OSError):
            self._control.send(KILL)

    def wait(self, timeout_s: float) -> str | None:
        while self._end is None and self._hear(timeout_s):
            pass
        return self._end

    def close(self) -> None:
        self.socket.close()
        self._control.close()

    def _hear(self, timeout_s: float) -> bool:
        """Take in a message of the server: the process id, then the exit code. False when none came in time."""
        if self._end is not None:
            return False
        # `select` cannot watch files above 1023, as a process with many connections has.
        messages = select.poll()
        messages.register(self._control, select.POLLIN)
        if not messages.poll(1000 * timeout_s):
            return False
        try:
            said = self._control.recv(64, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True  # another thread took it
        except ConnectionError:
            said = b""  # it ended before it heard what was sent to it
        if said and self._pid is None:
            self._pid = int(said)
        else:
            self._end = exit_text(int(said)) if said else "ended with its fork server"
            self._control.close()
        return True


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != switches.VARIABLE}


_shared: ForkServer | None = None
_lock = threading.Lock()


def shared_fork_server(environment: Mapping[str, str]) -> ForkServer | None:
    """Return the fork server of this process, started if there is none; None if it has another environment."""
    global _shared
    with _lock:
        if _shared is not None and not _shared.is_alive:
            _shared.close()
            _shared = None
        if _shared is None:
            _shared = ForkServer(environment)
        return _shared if _shared.serves(environment) else None


# The server's own side.

DEFERRED = frozenset(
    f"torch.{name}"
    for name in (
        "_meta_registrations", "distributed._meta_registrations", "distributions", "export", "masked", "nn.intrinsic",
        "nn.qat", "nn.quantizable", "nn.quantized", "quantization",
    )
)  # fmt: skip
"""Modules that torch imports for tracing and training: two fifths of the time that `import torch` takes."""
EXPECT_ALL = tuple(
    f"torch.{name}"
    for name in ("_decomp", "_dynamo", "_export", "_inductor", "_prims", "_refs", "utils._content_store")
)
"""Modules, with those below them, that rely on all of torch having been imported in its order."""


class DeferredImports(MetaPathFinder):
    """Finds the modules of DEFERRED, and lets each be executed when one of its attributes, or a module below it, is
    asked for first."""

    def __init__(self) -> None:
        self.has_torch = False
        """True when torch is imported: before that, its own order is the right one."""

    def import_torch(self) -> None:
        """Import torch without these modules, where it was not imported yet."""
        if "torch" not in sys.modules:
            sys.meta_path.insert(0, self)
            import_module("torch")
            self.has_torch = True

    def execute_all(self) -> None:
        """Execute the modules that were deferred, in torch's order."""
        for module in list(sys.modules.values()):
            if isinstance(module, _DeferredModule):
                module.execute()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_new = fullname not in sys.modules
        if self.has_torch and fullname.startswith(EXPECT_ALL):
            self.execute_all()
        above = sys.modules.get(fullname.rpartition(".")[0])
        if isinstance(above, _DeferredModule):
            above.execute()
        # What was executed may have imported this one.
        if is_new and fullname in sys.modules:
            return _imported(sys.modules[fullname])
        spec = PathFinder.find_spec(fullname, path, target) if fullname in DEFERRED else None
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferredLoader(spec.loader)
        return spec


class _DeferredLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing yet. Code that reloads the module, or looks for its source, gets the real loader."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader


class _ImportedLoader(Loader):
    """Loads a module that was imported while its own import began: it stays as it is."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


def _imported(module: ModuleType) -> ModuleSpec:
    spec = ModuleSpec(module.__name__, _ImportedLoader(module))
    # Of a module that is there the import system takes the spec from it.
    module.__spec__ = spec
    return spec


_deferred_lock = threading.RLock()


class _DeferredModule(ModuleType):
    """A module that was not executed yet."""

    def __getattr__(self, name: str) -> object:
        # `inspect` asks every module for such names.
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.execute()
        return getattr(self, name)

    def execute(self) -> None:
        with _deferred_lock:
            if self.__class__ is _DeferredModule:
                self.__class__ = ModuleType  # type: ignore[assignment]
                assert self.__spec__ is not None and self.__spec__.loader is not None
                self.__spec__.loader.exec_module(self)


class _Children:
    """The living engine processes, and the sockets over which each is killed and its end is told."""

    def __init__(self) -> None:
        self.control: dict[int, socket.socket] = {}

    def add(self, pid: int, control: socket.socket) -> None:
        self.control[pid] = control
        _tell(control, pid)

    def obey(self, pid: int) -> None:
        """Kill an engine whose owner said so, or has closed its end."""
        with contextlib.suppress(ConnectionError):  # its owner has gone, and never heard what was told
            self.control[pid].recv(64)
        os.kill(pid, signal.SIGKILL)

    def fds(self) -> list[int]:
        return [control.fileno() for control in self.control.values()]

    def reap(self) -> None:
        """Wait for the engines that have ended, and for the ranks of engines that ended before them."""
        with contextlib.suppress(ChildProcessError):  # no child is left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid in self.control:
                    with self.control.pop(pid) as control:
                        _tell(control, os.waitstatus_to_exitcode(status))


def _tell(control: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # its owner has gone
        control.send(str(number).encode())


def serve(commands: socket.socket) -> None:
    # Nothing that is imported is garbage.
    gc.disable()
    with contextlib.suppress(Exception):  # an engine that cannot import it says so to its own api process
        DeferredImports().import_torch()
        import_module("weft.engine.loop")
        import_module("weft.kernels.cpu.compiled")  # which loads LLVM
    gc.freeze()
    gc.enable()
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    adopt_orphans()
    children, own_pid = _Children(), os.getpid()
    while True:
        controls = {control.fileno(): pid for pid, control in children.control.items()}
        readable, _, _ = select.select([commands.fileno(), ended, *controls], [], [])
        if ended in readable:
            os.read(ended, 4096)
        for control in controls.keys() & readable:
            children.obey(controls[control])
        children.reap()
        if commands.fileno() in readable:
            data, fds, _, _ = socket.recv_fds(commands, MAX_MESSAGE_BYTES, 4)
            if not data:
                return  # the engines end with their parent
            engine, control, *streams = fds
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for fd in (ended, wake, commands.fileno(), control, *children.fds()):
                    os.close(fd)
                _run(msgspec.json.decode(data, type=ForkCommand), engine, streams, own_pid)
            for fd in (engine, *streams):
                os.close(fd)
            children.add(pid, socket.socket(fileno=control))


def _run(command: ForkCommand, engine: int, streams: list[int], server_pid: int) -> None:
    """Be the engine process, to its end."""
    try:
        os.setsid()
        end_with_parent()
        if os.getppid() != server_pid:
            os._exit(1)  # the server ended before it could be noticed
        name_process(ENGINE_NAME)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, fd in enumerate(streams, start=1):
            os.dup2(fd, number)
            os.close(fd)
        os.environ[switches.VARIABLE] = command.switched_off
        sys.argv = [command.module, *command.arguments, str(engine)]
        import_module(command.module).main()
    except BaseException:  # noqa: BLE001 - nothing may return into the server's loop
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
