"""What one key may ask for: the same accounts over both protocols, and nobody pays for another."""

from __future__ import annotations

import asyncio
import contextlib
import re
from datetime import UTC, datetime
from typing import Any

import grpc
import httpx
import pytest
from fastapi import FastAPI
from msgspec.structs import replace

from tests.api import raw
from tests.api.clock import Clock
from tests.api.grpc.calls import Client, answer_to, ask, failed, served
from tests.api.http import CHAT, COMPLETIONS, HELLO, PROMPT, error_of, real_server, request_app
from tests.api.scripted_engine import ScriptedEngine, answer, forever, next_turn
from tests.api.test_disconnect import post_raw
from tests.waiting import PATIENCE, until, wait_until
from weft.api.app import admission_app, build_app
from weft.api.error_responses import error_response
from weft.api.grpc.grpc_server import serve_rpc
from weft.api.middleware import duration
from weft.backends.contract import Stream
from weft.config import load
from weft.errors import Overloaded, Unavailable, WeftError
from weft.options import LimitOptions
from weft.serving.admission import Admission
from weft.serving.rate_limits import Account, Accounts, BodiesOfAll, BodiesOfKey, Bucket, RateLimited, RateLimitState
from weft.serving.timing import DEFAULT_ANSWER_TOKENS
from weft.types import GenerationRequest, Output

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


def test_tokens_are_reserved_and_settled() -> None:
    clock = Clock()
    limited = account(clock, max_tokens_per_minute_per_key=600)
    first, second = limited.reserve(400), limited.reserve(200)
    assert refusal(limited).retry_after_s == 1, "all are reserved"
    first.use(100)
    second.use(200)
    first.settle()
    first.settle()
    limited.reserve(300).settle()
    with pytest.raises(RateLimited, match="may take 301 tokens") as refused:
        limited.reserve(301)
    assert refused.value.retry_after_s == 1 and "300 left for now (--max-tokens" in str(refused.value)
    clock.now += 1
    limited.reserve(301)


def test_what_is_used_beyond_the_reservation_is_a_debt_at_once() -> None:
    clock = Clock()
    limited = account(clock, max_tokens_per_minute_per_key=600)
    reservation = limited.reserve(100)
    reservation.use(900)
    assert refusal(limited).retry_after_s == 31
    reservation.settle()
    clock.now += 30
    refusal(limited)
    clock.now += 0.1
    limited.enter()


def test_a_request_of_more_than_a_minutes_tokens_takes_a_full_bucket() -> None:
    """Else one that may write to the end of a long context could never begin."""
    clock = Clock()
    limited = account(clock, max_tokens_per_minute_per_key=600)
    reservation = limited.reserve(130_000)
    reservation.use(10)
    refusal(limited)
    reservation.settle()
    with pytest.raises(RateLimited):
        limited.reserve(130_000)
    clock.now += 1
    limited.reserve(130_000)


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
    assert not free.limits_tokens


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


LIMITS = {**KEYS, "max_requests_per_minute_per_key": 2, "max_tokens_per_minute_per_key": 5000}


def test_openai_s_headers_tell_what_is_left() -> None:
    app = build_app(ScriptedEngine(answer("x")), load(LIMITS, env={}))
    answers = [post(app, "a"), post(app, "a", stream=True), post(app, "a")]
    assert [told.status_code for told in answers] == [200, 200, 429]
    assert [told.headers["x-ratelimit-remaining-requests"] for told in answers] == ["1", "0", "0"]
    for told in answers:
        assert told.headers["x-ratelimit-limit-requests"] == "2"
        assert re.fullmatch(r"(1m)?[0-9.]+m?s", told.headers["x-ratelimit-reset-requests"])
        assert told.headers["x-ratelimit-limit-tokens"] == "5000"
        assert 0 < int(told.headers["x-ratelimit-remaining-tokens"]) <= 5000
        assert "x-ratelimit-reset-tokens" in told.headers
    assert post(app, "b").headers["x-ratelimit-remaining-requests"] == "1", "another key has its own"
    assert "x-ratelimit-limit-requests" not in post(app, "wrong").headers


def test_anthropic_s_headers_tell_it_below_its_path() -> None:
    app = build_app(ScriptedEngine(answer("x")), load(LIMITS, env={}))
    began = datetime.now(UTC)
    message = {"model": "scripted", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    for remaining in ("1", "0", "0"):
        told = request_app(app, "POST", "/v1/messages", json=message, headers={"x-api-key": "a"}).headers
        assert told["anthropic-ratelimit-requests-limit"] == "2"
        assert told["anthropic-ratelimit-requests-remaining"] == remaining
        assert datetime.fromisoformat(told["anthropic-ratelimit-requests-reset"]) > began
        assert told["anthropic-ratelimit-tokens-limit"] == "5000"
        assert not [name for name in told if name.startswith("x-ratelimit")]


def test_only_the_limits_that_are_on_are_told() -> None:
    app = build_app(ScriptedEngine(answer("x")), load({"max_tokens_per_minute_per_key": 5000}, env={}))
    told = [name for name in post(app).headers if "ratelimit" in name]
    assert sorted(told) == [f"x-ratelimit-{what}-tokens" for what in ("limit", "remaining", "reset")]
    free = build_app(ScriptedEngine(answer("x")), load(env={}))
    assert not [name for name in post(free).headers if "ratelimit" in name]


def test_a_limit_s_state_is_that_of_its_bucket() -> None:
    clock = Clock()
    limited = account(clock, max_requests_per_minute_per_key=60)
    limited.enter()
    limited.enter()
    assert limited.rate_limits() == [RateLimitState("requests", 60, 58, 2.0)]
    clock.now += 1.5
    assert limited.rate_limits() == [RateLimitState("requests", 60, 59, 0.5)]
    limited = account(clock, max_tokens_per_minute_per_key=600)
    limited.reserve(500).use(700)
    assert limited.rate_limits() == [RateLimitState("tokens", 600, 0, 70.0)], "a debt leaves nothing"


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0, "0s"), (0.0201, "21ms"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"), (60, "1m0s"), (362.25, "6m2.25s")],
)
def test_times_are_written_as_openai_writes_them(seconds: float, written: str) -> None:
    assert duration(seconds) == written


def test_every_error_of_these_statuses_tells_when_to_come_again() -> None:
    def kinds(error: type[WeftError]) -> list[type[WeftError]]:
        return [error, *(kind for below in error.__subclasses__() for kind in kinds(below))]

    for kind in kinds(WeftError):
        if kind.status in (429, 503):
            assert issubclass(kind, Overloaded | Unavailable)
            assert int(error_response(kind("full")).headers["retry-after"]) >= 1


def test_without_keys_all_clients_share_one_account() -> None:
    app = build_app(ScriptedEngine(answer("x")), load({"max_requests_per_minute_per_key": 2}, env={}))
    assert [post(app).status_code for _ in range(3)] == [200, 200, 429]
    assert request_app(app, "POST", "/tokenize", json={"prompt": "x"}).status_code == 429
    assert request_app(app, "GET", "/health").status_code == 200


def limited_app(engine: ScriptedEngine, tokens: int, **settings: Any) -> tuple[FastAPI, Bucket]:
    """An application whose clients have so many tokens a minute, in which no time passes, and what is left of them."""
    config = load({"max_tokens_per_minute_per_key": tokens, **settings}, env={})
    admission = Admission(config)
    admission._accounts = Accounts(config.limits, Clock())
    admission.open(engine)
    bucket = admission._accounts.of("")._tokens
    assert bucket is not None
    return admission_app(admission), bucket


def hang_up(url: str, engine: ScriptedEngine, path: str, body: dict[str, Any]) -> None:
    """Ask, and hang up when the engine has begun; with `stream`, when there was a token."""
    connection = post_raw(url, path, body)
    wait_until(lambda: bool(engine.open))
    assert not body.get("stream") or connection.recv(100)
    connection.close()
    wait_until(lambda: not engine.open)


def test_prompt_and_answer_are_charged() -> None:
    app, purse = limited_app(ScriptedEngine(answer("x" * 30)), 200)
    assert post(app, prompt="y" * 60, max_tokens=40).status_code == 200
    assert purse.level == 200 - 90, "what was reserved and not generated is given back"
    assert post(app, prompt="y" * 60, max_tokens=51).status_code == 429
    assert post(app, prompt="y" * 60, max_tokens=50).status_code == 200
    assert purse.level == 20


def test_an_answer_without_max_tokens_reserves_some() -> None:
    engine = ScriptedEngine([forever])
    engine.model = replace(engine.model, max_model_len=100_000)
    app, purse = limited_app(engine, 10_000)
    with real_server(app) as url:
        with post_raw(url, CHAT, HELLO | {"n": 2}):
            wait_until(lambda: bool(engine.open))
            num_prompt = len("<user>hi")
            assert purse.level == 10_000 - num_prompt - 2 * DEFAULT_ANSWER_TOKENS
        wait_until(lambda: purse.level == 10_000 - num_prompt)


def test_an_answer_cannot_pass_the_context_and_reserves_no_more() -> None:
    engine = ScriptedEngine([forever])
    app, purse = limited_app(engine, 10_000)
    with real_server(app) as url:
        with post_raw(url, COMPLETIONS, PROMPT | {"prompt": "y" * 950, "max_tokens": 5000}):
            wait_until(lambda: bool(engine.open))
            assert purse.level == 10_000 - engine.model.max_model_len
        wait_until(lambda: purse.level == 10_000 - 950)


def test_several_choices_are_charged_with_their_prompt_once() -> None:
    app, purse = limited_app(ScriptedEngine(answer("x")), 1000)
    assert post(app, prompt="y" * 60, n=3, max_tokens=5).status_code == 200
    assert purse.level == 1000 - 63


def test_a_refusal_of_the_engine_costs_nothing() -> None:
    app, purse = limited_app(ScriptedEngine(refuse=Overloaded("full")), 1000)
    assert post(app, max_tokens=5).status_code == 429
    assert purse.level == 1000


def test_requests_that_are_open_cannot_take_more_than_there_is() -> None:
    """Each of them would have come in while none had ended."""
    engine = ScriptedEngine([forever])
    app, _ = limited_app(engine, 1000)
    with real_server(app) as url, contextlib.ExitStack() as stack:
        body = PROMPT | {"max_tokens": 300}
        for number in range(1, 4):
            stack.enter_context(post_raw(url, COMPLETIONS, body))
            wait_until(lambda number=number: len(engine.open) == number)
        refused = httpx.post(url + COMPLETIONS, json=body, timeout=PATIENCE)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert "may take 302 tokens" in error_of(refused)["message"]


def test_a_prompt_is_paid_for_though_its_client_leaves_before_the_engine_begins() -> None:
    """An engine elsewhere returns when it has computed the prompt."""

    class Elsewhere(ScriptedEngine):
        async def submit(self, request: GenerationRequest) -> Stream:
            self.open.add(request.request_id)
            try:
                await forever()
            finally:
                self.open.discard(request.request_id)
            raise AssertionError

    engine = Elsewhere()
    app, purse = limited_app(engine, 1000)
    with real_server(app) as url:
        hang_up(url, engine, COMPLETIONS, PROMPT | {"prompt": "y" * 60, "max_tokens": 100})
        wait_until(lambda: purse.level == 1000 - 60)


def test_a_vector_is_paid_for_by_a_client_that_hangs_up() -> None:
    engine = ScriptedEngine()
    engine.embed_when = forever
    app, purse = limited_app(engine, 1000)
    with real_server(app) as url:
        hang_up(url, engine, "/v1/embeddings", {"model": "scripted", "input": ["y" * 60, "z" * 40]})
        wait_until(lambda: purse.level == 1000 - 100)
    engine.embed_when = next_turn
    assert request_app(app, "POST", "/v1/embeddings", json={"model": "scripted", "input": "x" * 7}).status_code == 200
    assert purse.level == 1000 - 107


def test_what_was_generated_before_a_hang_up_is_charged() -> None:
    async def scenario() -> None:
        config = load({"max_tokens_per_minute_per_key": 100, "grpc_port": 0}, env={})
        engine = ScriptedEngine([Output(text="z", token_ids=[1] * 200), forever])
        admission = Admission(config)
        admission.open(engine)

        server = await serve_rpc(admission, config)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = Client(channel).predict([ask()])
            assert (await call.read()).chunk == "z"
            _, code, _ = await failed(Client(channel).predict([ask()]))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, "before it has ended"
            call.cancel()
            await until(lambda: not engine.open)
            _, code, _ = await failed(Client(channel).predict([ask()]))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await server.stop(0)

    asyncio.run(scenario())


def test_grpc_has_the_same_limits() -> None:
    async def scenario() -> None:
        async with served(ScriptedEngine(answer("x")), **KEYS, max_requests_per_minute_per_key=1) as opened:
            first, second = Client(opened.channel, "a"), Client(opened.channel, "b")
            await answer_to(first, ask())
            _, code, details = await failed(first.predict([ask()]))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "--max-requests-per-minute-per-key" in details and "Try again in" in details
            await answer_to(second, ask())

    asyncio.run(scenario())


def test_http_and_grpc_share_the_accounts() -> None:
    """What is open at one counts at the other."""

    async def scenario() -> None:
        engine = ScriptedEngine([forever])
        async with served(engine, max_concurrent_per_key=1) as opened:
            running = opened.predict([ask()])
            await until(lambda: bool(engine.open))

            transport = httpx.ASGITransport(admission_app(opened.admission))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                refused = await client.post(CHAT, json=HELLO)
                assert refused.status_code == 429
                running.cancel()
                await until(lambda: not engine.open and not opened.admission.contexts())
                engine.script = answer("x")
                assert (await client.post(CHAT, json=HELLO)).status_code == 200

    asyncio.run(scenario())


def announced(path: str, num_bytes: int, key: str) -> bytes:
    """The head of a request whose body has so many bytes, and the beginning of that."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nX-Api-Key: {key}\r\n"
    return f'{head}Content-Length: {num_bytes}\r\n\r\n{{"model": "'.encode()


MIB = 1 << 20


@pytest.mark.parametrize(
    ("flags", "other_status", "said"),
    [
        ({"max_inflight_body_mb_per_key": 4}, 200, "--max-inflight-body-mb-per-key"),
        ({"max_inflight_body_mb": 4}, 503, "--max-inflight-body-mb"),
    ],
)
def test_unfinished_bodies_have_a_budget(flags: dict[str, int], other_status: int, said: str) -> None:
    """Three bodies of 2 MiB that never end: the third is refused when the budget of 4 MiB is used up. Another key is
    refused only where the budget is that of all, and comes in again when the bodies are gone."""
    config = load({**KEYS, "max_body_mb": 3, **flags}, env={})
    admission = Admission(config)
    engine = ScriptedEngine(answer("x"))
    admission.open(engine)
    held = admission._accounts._all_bodies
    with real_server(admission_app(admission), config) as url:

        def others() -> int:
            return httpx.post(url + COMPLETIONS, json=PROMPT, headers={"x-api-key": "b"}, timeout=PATIENCE).status_code

        with contextlib.ExitStack() as stack:
            for number in range(1, 3):
                connection = stack.enter_context(raw.connect(url))
                connection.sendall(announced(COMPLETIONS, 2 * MIB + 100, "a") + b"x" * (2 * MIB - 21))
                wait_until(lambda number=number: held.num_bytes > number * (2 * MIB - 11), "the body's bytes")
            refused = raw.exchange(url, announced(COMPLETIONS, 2 * MIB, "a") + b"x" * (1 << 16))
            assert raw.status_of(refused) == (429 if other_status == 200 else 503)
            head = refused.lower()
            assert b"retry-after: 1\r\n" in head and b"connection: close\r\n" in head and said.encode() in refused
            assert others() == other_status
            assert held.num_bytes <= 4 * MIB
        wait_until(lambda: held.num_bytes == 0, "the bodies' end")
        assert others() == 200 and held.num_bytes == 0
    assert len(engine.submitted) == (2 if other_status == 200 else 1)


def test_a_body_counts_until_it_was_parsed_and_not_while_it_is_answered() -> None:
    admission = Admission(load(env={}))
    engine = ScriptedEngine([forever])
    admission.open(engine)
    with real_server(admission_app(admission)) as url, post_raw(url, COMPLETIONS, PROMPT | {"prompt": "x" * 900}):
        wait_until(lambda: bool(engine.open))
        assert admission._accounts._all_bodies.num_bytes == 0


def test_the_largest_body_comes_in_alone_whatever_the_budget() -> None:
    accounts = Accounts(LimitOptions(max_inflight_body_mb=1, max_inflight_body_mb_per_key=2), max_body_mb=3)
    accounts.of("a").hold_body(3 * MIB)
    for tenant in ("a", "b"):
        with pytest.raises((BodiesOfKey, BodiesOfAll)):
            accounts.of(tenant).hold_body(1)
    accounts.of("a").release_body(3 * MIB)
    accounts.of("b").hold_body(3 * MIB)
    free = Accounts(LimitOptions(max_inflight_body_mb=0, max_inflight_body_mb_per_key=0))
    free.of("a").hold_body(1 << 40)


def test_a_key_has_many_requests_at_the_same_time_and_not_any_number() -> None:
    one = account(Clock())
    for _ in range(LimitOptions().max_concurrent_per_key):
        one.enter()
    assert "--max-concurrent-per-key" in str(refusal(one))
    free = account(Clock(), max_concurrent_per_key=0)
    for _ in range(3000):
        free.enter()
