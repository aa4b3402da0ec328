"""What a server knows of keys stays in its own process, and nobody reaches its processes but by its two ports."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.e2e.conftest import SECRETS
from tests.e2e.server import Server
from tests.waiting import PATIENCE

LISTENS = "0A"
MAPPED = "0000000000000000FFFF0000"


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


def test_no_process_of_a_server_has_its_keys_or_a_port_of_its_own(locked: Server) -> None:
    """The fork server, the engine, the process of templates and that of grammars."""
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "response_format": {"type": "json_object"},
    }
    key = {"authorization": f"Bearer {SECRETS['WEFT_API_KEY']}"}
    answer = httpx.post(f"{locked.url}/v1/chat/completions", json=body, headers=key, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    children = locked.children()
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children]
    assert len([name for name in ("fork_server", "template_sandbox", "grammars/") if name in "".join(commands)]) == 3
    here = "0100007F"
    assert listening([locked.process.pid]) == {(here, urlsplit(locked.url).port), (here, locked.grpc_port())}
    assert not listening(children)
    own = Path(f"/proc/{locked.process.pid}/environ").read_text()
    assert all(f"{name}={secret}" in own for name, secret in SECRETS.items())
    environments = [Path(f"/proc/{pid}/environ").read_text() for pid in children]
    assert len(environments) >= 4
    for command, found in zip(commands, environments, strict=True):
        assert not [name for name, secret in SECRETS.items() if name in found or f"={secret}" in found], command
