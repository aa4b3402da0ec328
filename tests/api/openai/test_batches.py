"""OpenAI's client at /v1/files and /v1/batches, over a real socket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.http import CHAT, COMPLETIONS, data_server
from tests.api.scripted_engine import ScriptedEngine, answer, forever
from tests.waiting import PATIENCE, wait_until
from weft.config import load
from weft.errors import Overloaded
from weft.types import LOWEST_PRIORITY

HELLO = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}


@contextmanager
def serving(folder: Path | str, engine: ScriptedEngine | None = None, **flags: Any) -> Iterator[str]:
    with data_server(engine or ScriptedEngine(), load({"data_dir": str(folder), **flags}, env={})) as url:
        yield url


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)


def line(custom_id: str, body: Any, url: str = CHAT) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


def upload(client: openai.OpenAI, lines: Sequence[bytes]) -> str:
    return client.files.create(file=("lines.jsonl", b"".join(lines)), purpose="batch").id


def started(client: openai.OpenAI, lines: Sequence[bytes], endpoint: Any = CHAT, **fields: Any) -> Any:
    return client.batches.create(
        input_file_id=upload(client, lines), endpoint=endpoint, completion_window="24h", **fields
    )


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    wait_until(lambda: client.batches.retrieve(batch_id).status in ("completed", "failed", "cancelled", "expired"))
    return client.batches.retrieve(batch_id)


def read_lines(client: openai.OpenAI, file_id: str) -> dict[str, Any]:
    results = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    assert len({result["custom_id"] for result in results}) == len(results)
    return {result["custom_id"]: result for result in results}


def test_a_file_is_kept_listed_read_and_deleted(tmp_path: Path) -> None:
    content = bytes(range(256)) * 3000 + b"\r\n--almost a boundary\r\n\r\n"
    with serving(tmp_path) as url, client_of(url) as client:
        kept = client.files.create(file=("../../näme.bin", content), purpose="user_data")
        assert (kept.filename, kept.bytes, kept.status) == ("../../näme.bin", len(content), "processed")
        empty = client.files.create(
            file=("e", b""), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert (empty.bytes, empty.expires_at) == (0, empty.created_at + 3600)
        assert client.files.content(kept.id).content == content
        assert [file.id for file in client.files.list()] == [empty.id, kept.id]
        assert [file.id for file in client.files.list(purpose="batch")] == [empty.id]
        assert [file.id for file in client.files.list(limit=1, order="asc")] == [kept.id, empty.id]
        assert client.files.delete(kept.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(kept.id)
    assert [path.suffix for path in sorted((tmp_path / "files").iterdir())] == ["", ".json"]


FORM = {"content-type": "multipart/form-data; boundary=x"}


@pytest.mark.parametrize(
    ("headers", "body", "status", "param"),
    [
        ({"content-type": "application/json"}, b"{}", 415, None),
        ({"content-type": "multipart/form-data"}, b"--", 415, None),
        (FORM, b"no boundary" + b"y" * 10_000, 400, None),
        (FORM, b"--x\r\nno name\r\n\r\n", 400, None),
        (FORM, b"--x\r\n" + b"y" * 10_000, 400, None),
        (FORM, b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nabc', 400, None),
        (FORM, b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n' + b"y" * 2000, 400, None),
        (FORM, b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--', 400, "file"),
        (FORM, b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\na\r\n--x--', 400, "purpose"),
        (FORM, b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\na\r\n--x--', 400, "file"),
        (FORM, b"--x\r\ncontent-disposition: form-data; name=a\r\n\r\n\r\n" * 9, 400, None),
    ],
)
def test_a_form_that_is_wrong_leaves_nothing(
    tmp_path: Path, headers: dict[str, str], body: bytes, status: int, param: str | None
) -> None:
    with serving(tmp_path) as url, httpx.Client(timeout=PATIENCE) as client:
        refused = client.post(url + "/v1/files", headers=headers, content=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text
    assert not (tmp_path / "files").exists() or not [*(tmp_path / "files").iterdir()]


def test_a_file_that_is_too_large_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, max_file_mb=1, max_data_mb_per_key=2) as url, client_of(url) as client:
        with pytest.raises(openai.APIStatusError, match="max-file-mb"):
            client.files.create(file=("f", b"x" * ((1 << 20) + 1)), purpose="batch")
        client.files.create(file=("f", b"x" * (1 << 20)), purpose="batch")
        with pytest.raises(openai.APIStatusError, match="max-data-mb-per-key"):
            client.files.create(file=("f", b"x" * (1 << 20)), purpose="batch")
        assert len(client.files.list().data) == 1
    assert len([*(tmp_path / "files").iterdir()]) == 2


def test_a_batch_answers_every_line(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    lines = [
        line("right", HELLO),
        line("priority", HELLO | {"priority": -5}),
        b"\n",
        line("wrong", HELLO | {"temperature": -1}),
        line("unknown", HELLO | {"model": "another"}),
        line("streamed", HELLO | {"stream": True}),
    ]
    with serving(tmp_path, engine) as url, client_of(url) as client:
        begun = started(client, lines, metadata={"a": "b"})
        assert (begun.status, begun.metadata) == ("validating", {"a": "b"})
        batch = ended(client, begun.id)
        assert batch.status == "completed" and batch.in_progress_at and batch.completed_at and batch.finalizing_at
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (5, 2, 3)
        right = read_lines(client, batch.output_file_id)
        assert right.keys() == {"right", "priority"}
        answered = right["right"]["response"]
        assert answered["status_code"] == 200 and answered["request_id"]
        assert answered["body"]["choices"][0]["message"]["content"] == "Hello, world"
        wrong = read_lines(client, batch.error_file_id)
        assert {name: result["response"]["status_code"] for name, result in wrong.items()} == {
            "wrong": 400, "unknown": 404, "streamed": 400,
        }  # fmt: skip
        assert wrong["wrong"]["response"]["body"]["error"]["param"] == "temperature"
        assert [listed.id for listed in client.batches.list()] == [batch.id]
    assert {submitted.priority for submitted in engine.submitted} == {LOWEST_PRIORITY}


@pytest.mark.parametrize(
    ("endpoint", "body", "read"),
    [
        (COMPLETIONS, {"prompt": "hi"}, lambda body: body["choices"][0]["text"]),
        ("/v1/embeddings", {"input": "hi"}, lambda body: body["data"][0]["embedding"]),
        ("/v1/responses", {"input": "hi"}, lambda body: body["output"][0]["content"][0]["text"]),
    ],
)
def test_other_endpoints_have_batches_too(
    tmp_path: Path, endpoint: str, body: dict[str, Any], read: Callable[[Any], object]
) -> None:
    with serving(tmp_path) as url, client_of(url) as client:
        batch = ended(client, started(client, [line("a", {"model": "scripted", **body}, endpoint)], endpoint).id)
        assert read(read_lines(client, batch.output_file_id)["a"]["response"]["body"])


@pytest.mark.parametrize(
    ("lines", "codes"),
    [
        ([], ["empty_file"]),
        ([b"no JSON\n", b"[]\n", b'{"custom_id": "a"}\n'], ["invalid_json_line"] * 3),
        ([line("a", HELLO), line("a", HELLO)], ["duplicate_custom_id"]),
        ([line("", HELLO)], ["invalid_custom_id"]),
        ([line("a", HELLO, "/v1/messages")], ["invalid_url"]),
        ([line("a", [1])], ["invalid_body"]),
        ([b'{"custom_id": "a", "body": ' + b"[" * 5000 + b"]" * 5000 + b"}"], ["invalid_json_line"]),
        ([line(str(number), HELLO) for number in range(4)], ["too_many_lines"]),
        ([line("a", {"x": "y" * (1 << 20)})], ["line_too_long"]),
        ([line("a", {"x": [0] * 300_000})], ["invalid_json_line"]),
    ],
)
def test_a_file_that_is_wrong_fails_as_a_whole(tmp_path: Path, lines: list[bytes], codes: list[str]) -> None:
    engine = ScriptedEngine()
    with (
        serving(tmp_path, engine, max_batch_lines=3, max_body_mb=1, max_json_values=200_000) as url,
        client_of(url) as client,
    ):
        batch = ended(client, started(client, lines).id)
        assert (batch.status, [error.code for error in batch.errors.data]) == ("failed", codes)
    assert not engine.submitted


def test_a_batch_that_is_cancelled_ends_with_what_it_has(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    with serving(tmp_path, engine, batch_concurrency=1) as url, client_of(url) as client:
        engine.script = [forever]
        begun = started(client, [line(str(number), HELLO) for number in range(5)])
        wait_until(lambda: engine.open)
        assert client.batches.cancel(begun.id).status == "cancelling"
        batch = ended(client, begun.id)
        assert (batch.status, batch.output_file_id) == ("cancelled", None)
        unanswered = read_lines(client, batch.error_file_id)
        assert {result["error"]["code"] for result in unanswered.values()} == {"batch_cancelled"}
        assert len(unanswered) == batch.request_counts.failed == 5
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(begun.id)
    assert not engine.open


def test_a_line_waits_for_capacity(tmp_path: Path) -> None:
    engine = ScriptedEngine(refuse=Overloaded("Full.", retry_after_s=1))
    with serving(tmp_path, engine) as url, client_of(url) as client:
        begun = started(client, [line("a", HELLO)])
        wait_until(lambda: client.batches.retrieve(begun.id).status == "in_progress")
        engine.refuse = None
        assert ended(client, begun.id).request_counts.completed == 1


def test_a_tenant_sees_its_own_alone(tmp_path: Path) -> None:
    keys = {"api_key": ["mine", "yours"], "max_batches_per_key": 1}
    engine = ScriptedEngine([forever])
    with serving(tmp_path, engine, **keys) as url, client_of(url, "mine") as mine, client_of(url, "yours") as yours:
        batch = started(mine, [line("a", HELLO)])
        with pytest.raises(openai.APIStatusError, match="max-batches-per-key"):
            started(mine, [line("a", HELLO)])
        assert yours.files.list().data == [] and yours.batches.list().data == []
        for ask in (
            lambda: yours.files.retrieve(batch.input_file_id),
            lambda: yours.files.content(batch.input_file_id),
            lambda: yours.files.delete(batch.input_file_id),
            lambda: yours.batches.retrieve(batch.id),
            lambda: yours.batches.cancel(batch.id),
            lambda: yours.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        assert mine.files.delete(batch.input_file_id).deleted, "a batch goes on without its file"
        wait_until(lambda: engine.open)
        mine.batches.cancel(batch.id)
        ended(mine, batch.id)


def test_batches_have_limits_of_their_own(tmp_path: Path) -> None:
    flags = {"max_requests_per_minute_per_key": 5}
    with serving(tmp_path, **flags) as url, client_of(url) as client:
        batch = started(client, [line("a", HELLO), line("b", HELLO)])
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        # Two of the five were the upload and the batch itself; its lines were none.
        for _ in range(3):
            client.chat.completions.create(**HELLO)
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(**HELLO)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_folder_that_cannot_be_used_is_told_of(tmp_path: Path, is_there: bool) -> None:
    (tmp_path / "file").write_text("")
    with serving(tmp_path / "file" if is_there else "") as url, client_of(url) as client:
        with pytest.raises(openai.APIStatusError, match="--data-dir") as refused:
            client.files.list()
        assert refused.value.status_code == 501 and str(tmp_path) not in refused.value.message


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    with serving(tmp_path) as one, client_of(one) as first, serving(tmp_path) as two, client_of(two) as second:
        upload(first, [line("a", HELLO)])
        with pytest.raises(openai.APIStatusError, match="--data-dir"):
            second.files.list()


def test_a_batch_is_asked_for_as_it_must_be(tmp_path: Path) -> None:
    with serving(tmp_path, ScriptedEngine(answer("x"))) as url, client_of(url) as client:
        kept = client.files.create(file=("f", b"x"), purpose="user_data")
        for fields in (
            {"input_file_id": kept.id},
            {"endpoint": "/v1/images/generations"},
            {"completion_window": "1h"},
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
        ):
            body = {"input_file_id": upload(client, []), "endpoint": CHAT, "completion_window": "24h"} | fields
            with pytest.raises(openai.BadRequestError) as refused:
                client.batches.create(**body)
            assert (refused.value.param or "").split(".")[0] in fields
