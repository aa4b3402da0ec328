"""What one key may ask for: the same accounts at both doors, and nobody pays for another."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import httpx
import pytest

from tests.api.clock import Clock
from tests.api.grpc.calls import Client, answer_to, ask, door, failed
from tests.api.http import CHAT, COMPLETIONS, HELLO, PROMPT, error_of, request_app
from tests.api.scripted_engine import ScriptedEngine, answer, forever
from tests.waiting import until
from weft.api.app import admission_app, build_app
from weft.api.grpc.grpc_server import serve_rpc
from weft.config import load
from weft.options import LimitOptions
from weft.serving.admission import Admission
from weft.serving.rate_limits import Account, Accounts, Bucket, RateLimited
from weft.types import Output

KEYS = {"api_key": ["a", "b"]}


def account(clock: Clock, **limits: int) -> Account:
    return Accounts(LimitOptions(**limits), clock).of("x")


def refusal(of: Account) -> RateLimited:
    with pytest.raises(RateLimited) as refused:
        of.enter()
    return refused.value


def test_a_bucket_fills_evenly_and_never_over_its_rim() -> None:
    bucket = Bucket(60, now=0.0)
    bucket.spend(60)
    assert bucket.seconds_until(1, 0.0) == 1.0
    assert bucket.seconds_until(1, 0.5) == 0.5
    assert bucket.seconds_until(30, 10.0) == 20.0
    assert bucket.seconds_until(60, 1000.0) == 0.0
    assert bucket.seconds_until(61, 1000.0) == 1.0


def test_requests_a_minute() -> None:
    clock = Clock()
    limited = account(clock, max_requests_per_minute_per_key=3)
    for _ in range(3):
        limited.enter()
        limited.leave()
    error = refusal(limited)
    assert error.retry_after_s == 20 and "--max-requests-per-minute-per-key" in str(error)
    clock.now += 19
    assert refusal(limited).retry_after_s == 1
    clock.now += 1
    limited.enter()
    refusal(limited)


def test_tokens_a_minute_are_a_debt_that_must_be_worked_off() -> None:
    clock = Clock()
    limited = account(clock, max_tokens_per_minute_per_key=600)
    limited.enter()
    limited.spend_tokens(900)
    error = refusal(limited)
    assert error.retry_after_s == 31 and "--max-tokens-per-minute-per-key" in str(error)
    clock.now += 30
    refusal(limited)
    clock.now += 0.1
    limited.enter()


def test_requests_at_the_same_time() -> None:
    limited = account(Clock(), max_concurrent_per_key=2)
    limited.enter()
    limited.enter()
    assert "--max-concurrent-per-key" in str(refusal(limited))
    limited.leave()
    limited.enter()


def test_a_refused_request_costs_nothing() -> None:
    clock = Clock()
    limited = account(clock, max_concurrent_per_key=1, max_requests_per_minute_per_key=2)
    limited.enter()
    for _ in range(5):
        refusal(limited)
    limited.leave()
    limited.enter()


def test_no_limit_is_the_default() -> None:
    free = account(Clock())
    for _ in range(1000):
        free.enter()
    free.spend_tokens(10**9)
    free.enter()


def post(app: Any, key: str = "", **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return request_app(app, "POST", COMPLETIONS, json=PROMPT | fields, headers=headers)


def test_http_answers_429_and_when_to_try_again() -> None:
    app = build_app(ScriptedEngine(answer("x")), load({**KEYS, "max_requests_per_minute_per_key": 2}, env={}))
    assert [post(app, "a").status_code for _ in range(3)] == [200, 200, 429]
    refused = post(app, "a")
    error = error_of(refused)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert post(app, "b").status_code == 200, "another key has its own account"
    metrics = request_app(app, "GET", "/metrics", headers={"x-api-key": "b"}).text
    assert 'weft_num_requests_rejected_total{model_name="scripted"} 2.0' in metrics


def test_without_keys_all_clients_share_one_account() -> None:
    app = build_app(ScriptedEngine(answer("x")), load({"max_requests_per_minute_per_key": 2}, env={}))
    assert [post(app).status_code for _ in range(3)] == [200, 200, 429]
    assert request_app(app, "POST", "/tokenize", json={"prompt": "x"}).status_code == 429
    assert request_app(app, "GET", "/health").status_code == 200


def test_prompt_and_answer_are_charged() -> None:
    settings = {"max_tokens_per_minute_per_key": 100}
    app = build_app(ScriptedEngine(answer("x" * 30)), load(settings, env={}))
    assert post(app, prompt="y" * 60).status_code == 200, "60 and 30 are charged"
    assert post(app, prompt="y" * 60).status_code == 200, "10 were left, and more is a debt"
    assert post(app).status_code == 429


def test_several_choices_are_charged_with_their_prompt_once() -> None:
    app = build_app(ScriptedEngine(answer("x")), load({"max_tokens_per_minute_per_key": 100}, env={}))
    assert post(app, prompt="y" * 60, n=3).status_code == 200
    assert post(app, prompt="y" * 30).status_code == 200, "63 were charged"
    assert post(app, prompt="y" * 30).status_code == 200
    assert post(app).status_code == 429


def test_what_was_generated_before_a_hang_up_is_charged() -> None:
    async def scenario() -> None:
        config = load({"max_tokens_per_minute_per_key": 100, "grpc_port": 0}, env={})
        engine = ScriptedEngine([Output(text="z", token_ids=[1] * 200), forever])
        gate = Admission(config)
        gate.open(engine)

        server = await serve_rpc(gate, config)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = Client(channel).predict([ask()])
            assert (await call.read()).chunk == "z"
            call.cancel()
            await until(lambda: not engine.open)
            _, code, _ = await failed(Client(channel).predict([ask()]))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await server.stop(0)

    asyncio.run(scenario())


def test_grpc_has_the_same_limits() -> None:
    async def scenario() -> None:
        async with door(ScriptedEngine(answer("x")), **KEYS, max_requests_per_minute_per_key=1) as opened:
            first, second = Client(opened.channel, "a"), Client(opened.channel, "b")
            await answer_to(first, ask())
            _, code, details = await failed(first.predict([ask()]))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "--max-requests-per-minute-per-key" in details and "Try again in" in details
            await answer_to(second, ask())

    asyncio.run(scenario())


def test_the_doors_share_the_accounts() -> None:
    """What is open at one counts at the other."""

    async def scenario() -> None:
        engine = ScriptedEngine([forever])
        async with door(engine, max_concurrent_per_key=1) as opened:
            running = opened.predict([ask()])
            await until(lambda: bool(engine.open))

            transport = httpx.ASGITransport(admission_app(opened.gate))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                refused = await client.post(CHAT, json=HELLO)
                assert refused.status_code == 429
                running.cancel()
                await until(lambda: not engine.open and not opened.gate.contexts())
                engine.script = answer("x")
                assert (await client.post(CHAT, json=HELLO)).status_code == 200

    asyncio.run(scenario())
