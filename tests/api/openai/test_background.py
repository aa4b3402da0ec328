"""Responses in the background: they go on without their client, who comes back for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.http import real_server
from tests.api.scripted_engine import ScriptedEngine, answer, forever
from tests.waiting import until, wait_until
from weft.api.app import admission_app, build_app
from weft.api.background import BackgroundWork
from weft.api.handler import FIELDS_HEADER
from weft.config import load
from weft.errors import EngineFault
from weft.serving.admission import Admission
from weft.types import Output

RESPONSES = "/v1/responses"
HELLO: dict[str, Any] = {"model": "scripted", "input": "hi", "background": True}


@contextmanager
def connected(engine: ScriptedEngine, **flags: Any) -> Iterator[openai.OpenAI]:
    app = build_app(engine, load(flags, env={}))
    with real_server(app) as url, openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_an_answer_is_polled_until_it_is_there() -> None:
    is_time = asyncio.Event()
    engine = ScriptedEngine([Output(text="Hel", token_ids=[1]), lambda: until(is_time.is_set), *answer("lo")])
    with connected(engine) as client:
        begun = client.responses.create(**HELLO)
        assert (begun.status, begun.background, begun.output) == ("queued", True, [])
        wait_until(lambda: client.responses.retrieve(begun.id).status == "in_progress")
        with pytest.raises(openai.BadRequestError, match="in progress"):
            client.responses.create(model="scripted", input="and?", previous_response_id=begun.id)
        is_time.set()
        wait_until(lambda: client.responses.retrieve(begun.id).status == "completed")
        assert client.responses.retrieve(begun.id).output_text == "Hello"
        assert client.responses.cancel(begun.id).status == "completed", "it has ended"
        engine.script = answer("so")
        assert (
            client.responses.create(model="scripted", input="and?", previous_response_id=begun.id).output_text == "so"
        )


def test_a_stream_is_read_on_from_any_event() -> None:
    is_time = asyncio.Event()
    engine = ScriptedEngine([Output(text="Hel", token_ids=[1]), lambda: until(is_time.is_set), *answer("lo")])
    with connected(engine) as client:
        stream = client.responses.create(**HELLO, stream=True)
        first = next(iter(stream))
        assert (first.type, first.response.status) == ("response.created", "queued")
        stream.close()
        is_time.set()
        for after in (0, 3):
            events = [*client.responses.retrieve(first.response.id, stream=True, starting_after=after)]
            assert [event.sequence_number for event in events] == [*range(after + 1, after + 1 + len(events))]
            assert (events[-1].type, events[-1].response.output_text) == ("response.completed", "Hello")
        wait_until(lambda: not engine.open)


@pytest.mark.parametrize("stream", [False, True])
def test_fields_without_effect_are_named_at_once(stream: bool) -> None:
    with connected(ScriptedEngine(answer("so"))) as client:
        begun = client.responses.with_raw_response.create(**HELLO, stream=stream, safety_identifier="me")
        assert begun.headers[FIELDS_HEADER] == "safety_identifier"


def test_an_answer_is_cancelled_by_its_client_alone() -> None:
    engine = ScriptedEngine([Output(text="Hel", token_ids=[1]), forever])
    with connected(engine) as client:
        begun = client.responses.create(**HELLO)
        wait_until(lambda: client.responses.retrieve(begun.id).status == "in_progress")
        assert client.responses.cancel(begun.id).status == "cancelled"
        assert client.responses.retrieve(begun.id).status == "cancelled"
        wait_until(lambda: not engine.open)
        deleted = client.responses.create(**HELLO)
        wait_until(lambda: engine.open)
        client.responses.delete(deleted.id)
        wait_until(lambda: not engine.open)
        engine.script = answer("so")
        waited_for = client.responses.create(model="scripted", input="hi")
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.cancel(waited_for.id)
        with pytest.raises(openai.BadRequestError, match="stream"):
            client.responses.retrieve(waited_for.id, stream=True)
        with pytest.raises(openai.NotFoundError):
            client.responses.cancel("resp_0")


def test_what_fails_is_kept_as_failed() -> None:
    with connected(ScriptedEngine([EngineFault("It died.")])) as client:
        begun = client.responses.create(**HELLO)
        wait_until(lambda: client.responses.retrieve(begun.id).status == "failed")
        assert client.responses.retrieve(begun.id).error.code == "server_error"


@pytest.mark.parametrize(("fields", "flags"), [({"store": False}, {}), ({}, {"responses_store_entries": 0})])
def test_what_is_not_kept_is_not_generated_in_the_background(fields: dict[str, Any], flags: dict[str, Any]) -> None:
    engine = ScriptedEngine()
    with connected(engine, **flags) as client, pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**HELLO, **fields)
    assert refused.value.param == "background" and not engine.submitted


def test_wrong_requests_are_refused_at_once_and_the_concurrent_are_bounded() -> None:
    engine = ScriptedEngine([forever])
    with connected(engine, max_concurrent_per_key=1) as client:
        with pytest.raises(openai.BadRequestError):
            client.responses.create(**HELLO, temperature=-1)
        begun = client.responses.create(**HELLO)
        with pytest.raises(openai.RateLimitError):
            client.responses.create(**HELLO)
        client.responses.cancel(begun.id)
        assert client.responses.create(**HELLO).status == "queued"


# A server that is followed by another over the same folder.


@asynccontextmanager
async def serving(
    folder: Path, engine: ScriptedEngine, **flags: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, BackgroundWork]]:
    admission = Admission(load({"data_dir": str(folder), **flags}, env={}))
    admission.open(engine)
    background = BackgroundWork(admission)
    await background.start()
    transport = httpx.ASGITransport(admission_app(admission, background))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        try:
            yield client, background
        finally:
            await background.stop()


async def completed(client: httpx.AsyncClient, background: BackgroundWork) -> str:
    """The id of a response in the background that has ended."""
    response_id: str = (await client.post(RESPONSES, json=HELLO)).json()["id"]

    def has_ended() -> bool:
        kept = background.responses.get("", response_id)
        return kept is not None and kept.log is not None and kept.log.ended

    await until(has_ended)
    return response_id


def test_an_answer_is_there_after_a_restart(tmp_path: Path) -> None:
    async def go() -> None:
        async with serving(tmp_path, ScriptedEngine(answer("Hello"))) as (client, background):
            response_id = await completed(client, background)
            before = (await client.get(f"{RESPONSES}/{response_id}")).json()
        assert (before["status"], before["output"][0]["content"][0]["text"]) == ("completed", "Hello")
        engine = ScriptedEngine(answer("so"))
        async with serving(tmp_path, engine) as (client, _):
            assert (await client.get(f"{RESPONSES}/{response_id}")).json() == before
            assert (await client.post(f"{RESPONSES}/{response_id}/cancel")).json() == before
            [item] = (await client.get(f"{RESPONSES}/{response_id}/input_items")).json()["data"]
            assert item["content"][0]["text"] == "hi"
            await client.post(
                RESPONSES, json={"model": "scripted", "input": "and?", "previous_response_id": response_id}
            )
            assert [message["content"] for message in engine.messages] == ["hi", "Hello", "and?"]
            assert (await client.delete(f"{RESPONSES}/{response_id}")).json()["deleted"]
        assert not [*(tmp_path / "responses").iterdir()]

    asyncio.run(go())


def test_an_answer_that_a_restart_interrupted_has_failed_and_says_why(tmp_path: Path) -> None:
    async def begin() -> str:
        engine = ScriptedEngine([Output(text="Hel", token_ids=[1]), forever])
        async with serving(tmp_path, engine) as (client, _):
            response_id: str = (await client.post(RESPONSES, json=HELLO)).json()["id"]
            await until(lambda: bool(engine.open))
            return response_id

    async def look(response_id: str) -> None:
        async with serving(tmp_path, ScriptedEngine()) as (client, _):
            found = (await client.get(f"{RESPONSES}/{response_id}")).json()
            assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
            assert "The server was stopped" in found["error"]["message"]

    begun = asyncio.run(begin())
    for _ in range(2):
        asyncio.run(look(begun))


def test_the_folder_has_no_more_answers_than_the_store(tmp_path: Path) -> None:
    async def go() -> None:
        async with serving(tmp_path, ScriptedEngine(answer("so")), responses_store_entries=1) as (client, background):
            _, last = [await completed(client, background) for _ in range(2)]
        assert [path.name for path in (tmp_path / "responses").iterdir()] == [f"{last}.json"]

    asyncio.run(go())
