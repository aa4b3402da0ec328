"""Anthropic's client at /v1/messages/batches and /v1/models, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.api.http import data_server, real_server, request
from tests.api.scripted_engine import ScriptedEngine, forever
from tests.waiting import PATIENCE, wait_until
from weft.api.app import build_app
from weft.config import load
from weft.types import LOWEST_PRIORITY, Adapter

if TYPE_CHECKING:
    import anthropic

HELLO = {"model": "scripted", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture(autouse=True, scope="module")
def their_client() -> None:
    """Two seconds, for the one worker that runs this file."""
    global anthropic
    import anthropic


@contextmanager
def connected(folder: Path, engine: ScriptedEngine, **flags: Any) -> Iterator[anthropic.Anthropic]:
    config = load({"data_dir": str(folder), **flags}, env={})
    with data_server(engine, config) as url, anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ended(client: anthropic.Anthropic, batch_id: str) -> Any:
    wait_until(lambda: client.messages.batches.retrieve(batch_id).processing_status == "ended")
    return client.messages.batches.retrieve(batch_id)


def test_a_batch_of_messages_is_answered_and_deleted(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    with connected(tmp_path, engine) as client:
        batches = client.messages.batches
        begun = batches.create(
            requests=[
                {"custom_id": "right", "params": HELLO},
                {"custom_id": "wrong", "params": HELLO | {"max_tokens": 0}},
            ]
        )
        assert (begun.processing_status, begun.request_counts.processing, begun.results_url) == ("in_progress", 2, None)
        batch = ended(client, begun.id)
        assert (batch.request_counts.succeeded, batch.request_counts.errored) == (1, 1)
        results = {line.custom_id: line.result for line in batches.results(batch.id)}
        assert results["right"].message.content[0].text == "Hello, world"
        assert results["wrong"].error.error.type == "invalid_request_error"
        assert [listed.id for listed in batches.list()] == [batch.id]
        assert batches.delete(batch.id).type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError):
            batches.retrieve(batch.id)
    assert [submitted.priority for submitted in engine.submitted] == [LOWEST_PRIORITY]
    assert not [*(tmp_path / "batches").iterdir()]


def test_a_batch_is_cancelled(tmp_path: Path) -> None:
    engine = ScriptedEngine([forever])
    with connected(tmp_path, engine) as client:
        batches = client.messages.batches
        begun = batches.create(requests=[{"custom_id": "a", "params": HELLO}])
        wait_until(lambda: engine.open)
        with pytest.raises(anthropic.ConflictError):
            batches.delete(begun.id)
        with pytest.raises(anthropic.AnthropicError):
            batches.results(begun.id)
        assert batches.cancel(begun.id).processing_status == "canceling"
        batch = ended(client, begun.id)
        assert batch.request_counts.canceled == 1 and batch.cancel_initiated_at
        assert [line.result.type for line in batches.results(batch.id)] == ["canceled"]


def test_pages_of_batches(tmp_path: Path) -> None:
    with connected(tmp_path, ScriptedEngine()) as client:
        batches = client.messages.batches
        made = [batches.create(requests=[{"custom_id": "a", "params": HELLO}]).id for _ in range(3)]
        newest_first = made[::-1]
        assert [batch.id for batch in batches.list(limit=2)] == newest_first
        page = batches.list(limit=1, before_id=newest_first[2])
        assert ([batch.id for batch in page.data], page.has_more) == ([newest_first[1]], True)
        for batch_id in made:
            ended(client, batch_id)


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{}",
        b'{"requests": []}',
        b'{"requests": [{"custom_id": "a b", "params": {}}]}',
        b'{"requests": [{"custom_id": "a", "params": []}]}',
        b'{"requests": [{"custom_id": "a", "params": {}}, {"custom_id": "a", "params": {}}]}',
        b'{"requests": [{"custom_id": "a", "params": {}, "other": 1}]}',
        b'{"requests": [' + b",".join(b'{"custom_id": "%d", "params": {}}' % number for number in range(4)) + b"]}",
        b'{"requests": [{"custom_id": "a", "params": ' + b"[" * 5000 + b"]" * 5000 + b"}]}",
    ],
)
def test_a_batch_that_is_wrong_is_refused_as_a_whole(tmp_path: Path, body: bytes) -> None:
    config = load({"data_dir": str(tmp_path / "data"), "max_batch_lines": 3}, env={})
    headers = VERSION | {"content-type": "application/json"}
    refused = request(ScriptedEngine(), "POST", "/v1/messages/batches", config, content=body, headers=headers)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert not (tmp_path / "data").exists()


def test_anthropics_clients_get_their_list_of_models() -> None:
    engine = ScriptedEngine()
    engine.adapters = [Adapter(name=name, number=number, path="/x") for number, name in enumerate("ab", 1)]
    with real_server(build_app(engine, load(env={}))) as url:
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            listed = [*client.models.list(limit=2)]
            assert [model.id for model in listed] == ["scripted", "a", "b"]
            assert listed[0].type == "model" and listed[0].display_name == "scripted" and listed[0].created_at.year
            assert client.models.retrieve("a").id == "a"
            page = client.models.list(before_id="b", limit=1)
            assert ([model.id for model in page.data], page.has_more, page.first_id) == (["a"], True, "a")
            with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
                client.models.retrieve("c")
        assert httpx.get(url + "/v1/models", timeout=PATIENCE).json()["object"] == "list"
