"""What a server knows of keys stays in its own process."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.e2e.tiny_server import NAME, TinyServer
from tests.waiting import PATIENCE

SECRETS = ("WEFT_API_KEY", "WEFT_ADMIN_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "NVIDIA_API_KEY", "DATABASE_URL")
SECRET = "sesame-open-wide"


def test_no_process_of_a_server_has_its_keys(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        environments = [Path(f"/proc/{pid}/environ").read_text() for pid in children]
        assert len(environments) >= 4
        assert not [command for command, found in zip(commands, environments, strict=True) if SECRET in found]
