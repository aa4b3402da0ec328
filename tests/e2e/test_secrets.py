"""What a server knows of keys stays in its own process, and nobody reaches its processes but by its two ports."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.tiny_server import NAME, TinyServer
from tests.waiting import PATIENCE

LISTENS = "0A"
MAPPED = "0000000000000000FFFF0000"
SECRETS = ("WEFT_API_KEY", "WEFT_ADMIN_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "NVIDIA_API_KEY", "DATABASE_URL")
SECRET = "sesame-open-wide"


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """The addresses, in the kernel's spelling, and ports on which these processes listen."""
    sockets = {str(file.readlink()) for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in sockets:
                found.add((address.removeprefix(MAPPED), int(port, 16)))
    return found


def test_no_process_of_a_server_has_its_keys_or_a_port_of_its_own(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server, the engine, the process of templates and that of grammars."""
    for name in SECRETS:
        monkeypatch.setenv(name, SECRET)
    with TinyServer(tiny_model) as server:
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 2,
            "response_format": {"type": "json_object"},
        }
        answer = httpx.post(
            f"{server.url}/v1/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {SECRET}"},
            timeout=PATIENCE,
        )
        assert answer.status_code == 200, answer.text
        children = server.children()
        commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children]
        assert (
            len([name for name in ("fork_server", "template_sandbox", "grammars/") if name in "".join(commands)]) == 3
        )
        here = "0100007F"
        assert listening([server.process.pid]) == {(here, urlsplit(server.url).port), (here, server.grpc_port())}
        assert not listening(children)
        environments = [Path(f"/proc/{pid}/environ").read_text() for pid in children]
        assert len(environments) >= 4
        assert not [command for command, found in zip(commands, environments, strict=True) if SECRET in found]
