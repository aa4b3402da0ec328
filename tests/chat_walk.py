"""What one streamed chat takes to read, measured on a real server over the tiny model: `python -m tests.chat_walk`.

The walk is the files of the api process whose functions run between the request and the end of its stream, in the
order in which they are first entered, without the ground modules that every file stands on. The closure is every
module of weft that the api process and the engine process have imported by then.
"""

from __future__ import annotations

import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
from msgspec import Struct

import weft
from tests.e2e.server import run_first
from tests.e2e.tiny_server import NAME, TinyServer
from tests.waiting import PATIENCE, wait_until

PACKAGE = Path(weft.__file__).parent
TRACING = Path(__file__).parent / "chat_tracing"
SERVER = "weft.api.server"
"""The server's own life, which may not have come to rest when the chat begins."""
WALKED_PACKAGES = ("api", "serving", "backends", "engine", "text")


class ChatTrace(Struct, frozen=True):
    walk: list[str]
    """Modules in the order in which the chat first enters them."""
    imported: dict[str, list[str]]
    """Modules by process: api, engine."""

    @property
    def closure(self) -> set[str]:
        return {module for modules in self.imported.values() for module in modules}


def trace_chat(model: Path, folder: Path) -> ChatTrace:
    """Serve the model, stream one chat, and return what ran. `folder` must be empty."""
    env = run_first(TRACING / "sitecustomize.py", folder)
    with TinyServer(model, "--no-grpc", "--device", "cpu", env=env) as server:
        server.process.send_signal(signal.SIGUSR1)
        wait_until((folder / "armed").exists, "the profiler")
        text = _stream_chat(server.url)
        assert text.endswith("data: [DONE]\n\n"), text
        server.process.send_signal(signal.SIGUSR2)
        wait_until((folder / "calls").exists, "the profile")
        imported = {role: _modules(folder / f"{role}.modules") for role in ("api", "engine")}
    called = (folder / "calls").read_text().split()
    walk = [name for name in called if package_of(name) in WALKED_PACKAGES and name != SERVER]
    return ChatTrace(walk, imported)


def _stream_chat(url: str) -> str:
    messages = [{"role": "user", "content": "What runs across the warp?"}]
    body = {"model": NAME, "messages": messages, "max_tokens": 8, "temperature": 0, "stream": True}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.text


def _modules(file: Path) -> list[str]:
    return [name for name in dict.fromkeys(file.read_text().split()) if _file(name).exists()]


def _file(module: str) -> Path:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def package_of(module: str) -> str:
    """The package below weft; for a module of the ground, weft itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else "weft"


def num_lines(module: str) -> int:
    return len(_file(module).read_text().splitlines())


def lines_by_package(trace: ChatTrace) -> Counter[str]:
    lines: Counter[str] = Counter()
    for module in trace.closure:
        lines[package_of(module)] += num_lines(module)
    return lines


def report(trace: ChatTrace) -> Iterator[str]:
    yield f"The walk of one streamed chat: {len(trace.walk)} files, {sum(map(num_lines, trace.walk)):,} lines"
    for module in trace.walk:
        yield f"  {_file(module).relative_to(PACKAGE.parent)}"
    lines = lines_by_package(trace)
    yield f"The closure of one streamed chat: {len(trace.closure)} files, {lines.total():,} lines"
    for role, modules in trace.imported.items():
        yield f"  {sum(map(num_lines, modules)):6,} in the {role} process"
    for package, count in lines.most_common():
        yield f"  {count:6,} {package}"


def main() -> None:
    from tests import tiny_models

    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.save_directory("smollm2", Path(folder) / "model")
        (notes := Path(folder) / "notes").mkdir()
        print("\n".join(report(trace_chat(model, notes))))


if __name__ == "__main__":
    main()
