"""One server, two models of a registry file: Weft's own engine and vLLM, of which one is loaded at a time."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from tests.backends.vllm.real import eager, needs_vllm
from tests.e2e.server import Server
from tests.processes import is_engine

pytestmark = needs_vllm


def test_each_model_has_its_own_engine_and_gives_its_memory_back(vllm_model: Path, tmp_path: Path) -> None:
    limits = {"path": str(vllm_model), "max_model_len": 512, "kv_cache_memory_mb": 64}
    models = {"own": limits | {"engine": "native"}, "vllm": limits | {"engine": "cpu-vllm"}}
    file = tmp_path / "models.json"
    file.write_text(json.dumps({"models": models}))
    flags = ("--max-loaded-models", "1", "--model-wait-s", "900", "--start-timeout-s", "1000", "--image-model", "none")
    restore = eager()
    try:
        with Server("--models-file", str(file), *flags) as server:

            def answer(model: str) -> str:
                body = {"model": model, "prompt": "The sea", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=1000)
                assert response.status_code == 200, response.text
                return str(response.json()["choices"][0]["text"])

            def engines() -> tuple[int, int]:
                """Weft's own, and vLLM's."""
                commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in server.children()]
                return sum(map(is_engine, server.children())), sum("weft.backends.vllm.host" in one for one in commands)

            first = answer("own")
            assert engines() == (1, 0)
            assert answer("vllm") == first, "the same weights, and the same greedy choice"
            assert engines() == (0, 1)
            assert answer("own") == first
            assert engines() == (1, 0)
    finally:
        restore()
