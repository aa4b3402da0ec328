"""Batches and background responses on a real server, which is killed in the middle of them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx
import openai

from tests.e2e.tiny_server import NAME, TinyServer
from tests.waiting import PATIENCE, wait_until

NUM_LINES = 40
CHAT = "/v1/chat/completions"


def test_a_batch_goes_on_after_its_server_was_killed(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--data-dir", str(tmp_path), "--batch-concurrency", "2", "--image-model", "none", "--threads", "1")
    body = {"model": NAME, "messages": [{"role": "user", "content": "Sing."}], "max_tokens": 64, "ignore_eos": True}
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": CHAT, "body": body | {"seed": number}})
        for number in range(NUM_LINES)
    ]
    with TinyServer(tiny_model, *flags) as server:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 3)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(PATIENCE)
    [results] = (tmp_path / "batches").glob("*.results")
    before = [json.loads(line.partition(b"\t")[0])[0] for line in results.read_bytes().split(b"\n")[:-2]]
    assert 3 <= len(before) + 1 < NUM_LINES, "it was killed in the middle"
    with TinyServer(tiny_model, *flags) as server:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
            done = client.batches.retrieve(batch.id)
            assert (done.request_counts.completed, done.request_counts.failed) == (NUM_LINES, 0)
            answers = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
            assert sorted(int(answer["custom_id"]) for answer in answers) == [*range(NUM_LINES)]
            assert [answer["custom_id"] for answer in answers[: len(before)]] == before
            alone = httpx.post(server.url + CHAT, json=body | {"seed": 0}, timeout=PATIENCE).json()
            [first] = [answer for answer in answers if answer["custom_id"] == "0"]
            assert first["response"]["body"]["choices"] == alone["choices"]
        # What was done before was not asked of the engine again.
        assert server.metric("weft_request_success_total") <= NUM_LINES - len(before) + 1
        server.check_unharmed()


def test_background_responses_are_there_after_their_server_was_killed(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--data-dir", str(tmp_path), "--image-model", "none", "--threads", "1")
    with TinyServer(tiny_model, *flags) as server:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            whole = client.responses.create(model=NAME, input="Sing.", max_output_tokens=4, background=True)
            wait_until(lambda: client.responses.retrieve(whole.id).status in ("completed", "incomplete"))
            before = client.responses.retrieve(whole.id)
            begun = [client.responses.create(model=NAME, input="Sing.", background=True) for _ in range(8)]
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(PATIENCE)
    records = {one.id: json.loads((tmp_path / "responses" / f"{one.id}.json").read_bytes()) for one in begun}
    with TinyServer(tiny_model, *flags) as server:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            assert client.responses.retrieve(whole.id) == before
            for one in begun:
                was, found = records[one.id]["answer"]["status"], client.responses.retrieve(one.id)
                assert found.status == ("failed" if was == "queued" else was)
            client.responses.create(model=NAME, input="More.", previous_response_id=whole.id, max_output_tokens=4)
        server.check_unharmed()
