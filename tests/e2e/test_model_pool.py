"""Real servers of several real models: every loaded one has an engine process of its own, and gives it back."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.server import Server
from tests.forked import weft
from tests.processes import is_engine
from tests.waiting import PATIENCE, wait_until
from weft.api.handler import FIELDS_HEADER

ADMIN = {"x-api-key": "root"}
FLAGS = ("--kv-cache-memory-mb", "32", "--image-model", "none", "--threads", "1", "--admin-key", "root")


class PoolServer(Server):
    def __init__(self, file: Path, *flags: str) -> None:
        self.file = file
        super().__init__("--models-file", str(file), *FLAGS, *flags)

    def engine_pids(self) -> list[int]:
        return [pid for pid in self.children() if is_engine(pid)]

    def states(self) -> dict[str, str]:
        return {card["id"]: card["state"] for card in self.get("/v1/models").json()["data"]}

    def complete(self, model: str, tokens: int = 4, **fields: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=body(model, tokens) | fields, timeout=PATIENCE)

    def admin(self, what: str, **body: str) -> httpx.Response:
        return httpx.post(f"{self.url}/admin/models/{what}", json=body, headers=ADMIN, timeout=PATIENCE)


def body(model: str, tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": "The sea", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def write(file: Path, models: dict[str, dict[str, Any]]) -> Path:
    other = file.with_suffix(".next")
    other.write_text(json.dumps({"models": models}, indent=1))
    return other.replace(file)


@pytest.fixture(scope="module")
def models(tiny_directory: Callable[[str], Path]) -> dict[str, dict[str, Any]]:
    return {"first": {"path": str(tiny_directory("smollm2"))}, "second": {"path": str(tiny_directory("qwen3"))}}


@pytest.fixture(scope="module")
def pool(models: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolServer]:
    with PoolServer(write(tmp_path_factory.mktemp("pool") / "models.json", models), "--preload", "first") as pool:
        yield pool


def test_two_models_answer_by_name_each_from_an_engine_of_its_own(pool: PoolServer) -> None:
    assert pool.states() == {"first": "loaded", "second": "unloaded"}
    assert len(pool.engine_pids()) == 1
    with ThreadPoolExecutor(10) as herd:
        answers = [*herd.map(pool.complete, ["second"] * 10)]
    assert {answer.status_code for answer in answers} == {200}
    texts = {answer.json()["choices"][0]["text"] for answer in answers}
    assert len(texts) == 1
    assert {*texts} != {pool.complete("first").json()["choices"][0]["text"]}
    assert len(pool.engine_pids()) == 2
    assert 'weft_model_loads_total{model_name="second"} 1.0' in pool.get("/metrics").text


def test_openai_s_client_lists_them(pool: PoolServer) -> None:
    client = openai.OpenAI(base_url=f"{pool.url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["first", "second"]
    chat = client.chat.completions.create(
        model="first", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=3
    )
    assert chat.model == "first"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="third", prompt="hi")


def test_unloading_ends_the_engine_and_gives_its_memory_back(pool: PoolServer) -> None:
    pool.complete("second")
    before = {*pool.engine_pids()}
    assert pool.admin("unload", model="second").json()["state"] == "unloaded"
    [gone] = before - {*pool.engine_pids()}
    assert not Path(f"/proc/{gone}").exists()
    assert len(pool.engine_pids()) == 1
    assert pool.complete("first").status_code == 200


def test_the_death_of_one_engine_is_not_heard_by_the_other_s_streams(pool: PoolServer) -> None:
    pool.admin("unload", model="second")
    [first] = pool.engine_pids()
    assert pool.admin("load", model="second").json()["state"] == "loaded"
    [second] = {*pool.engine_pids()} - {first}
    whole = pool.complete("first", 300).json()["choices"][0]["text"]
    begun = threading.Event()
    texts: list[str] = []

    def stream() -> None:
        asked = body("first", 300) | {"stream": True}
        with httpx.stream("POST", f"{pool.url}/v1/completions", json=asked, timeout=PATIENCE) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    begun.set()
                    texts.append(json.loads(line[6:])["choices"][0]["text"])

    reading = threading.Thread(target=stream)
    reading.start()
    assert begun.wait(PATIENCE)
    os.kill(second, signal.SIGKILL)
    assert pool.complete("second").status_code == 200
    reading.join(PATIENCE)
    assert "".join(texts) == whole
    assert first in pool.engine_pids() and second not in pool.engine_pids()
    lines = pool.get("/metrics").text.splitlines()
    assert 'weft_engine_restarts_total{model_name="first"} 0.0' in lines
    assert 'weft_engine_restarts_total{model_name="second"} 1.0' in lines


def test_the_file_changes_while_it_serves(pool: PoolServer, models: dict[str, dict[str, Any]]) -> None:
    before = {*pool.engine_pids()}
    pool.file.write_text('{"models": {"first": {"pat": 1}}}')
    wait_until(lambda: any("the models stay as they were" in line and "models.json:1" in line for line in pool.log))
    assert pool.complete("first").status_code == 200
    write(pool.file, {"third": models["second"], "first": {**models["first"], "max_model_len": 64}})
    wait_until(lambda: not before & {*pool.engine_pids()})
    wait_until(lambda: pool.states() == {"third": "unloaded", "first": "loaded"})
    assert pool.complete("second").status_code == 404
    assert "max_tokens" in pool.complete("first", 100).headers[FIELDS_HEADER]


def test_one_at_a_time_and_one_that_is_damaged(models: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in Path(models["second"]["path"]).iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:-100])
    file = write(tmp_path / "models.json", {**models, "damaged": {"path": "./damaged"}})
    check = weft("serve", "--models-file", str(file), "--check-models", environment=os.environ)
    first, second, third = check.stdout.splitlines()
    assert check.returncode == 1
    assert first.endswith("models.json:3: first: ok") and second.endswith("models.json:6: second: ok")
    assert "models.json:9: damaged: " in third and "model.safetensors" in third
    with PoolServer(file, "--max-loaded-models", "1") as pool:
        wait_until(lambda: any("models.json:9: damaged cannot be loaded" in line for line in pool.log))
        assert pool.states() == {"first": "unloaded", "second": "unloaded", "damaged": "failed"}
        for name in ("first", "second"):
            assert pool.complete(name).status_code == 200
            assert len(pool.engine_pids()) == 1
        assert pool.states()["first"] == "unloaded"
        failed = pool.complete("damaged")
        assert failed.status_code == 503 and "'damaged' could not be loaded" in failed.json()["error"]["message"]
        assert pool.complete("second").status_code == 200
