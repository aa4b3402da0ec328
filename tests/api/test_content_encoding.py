"""Compressed bodies, read within their limits, and compressed answers."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import zstandard

from tests.api.http import CHAT, HELLO, error_of, events, real_server, request
from tests.api.scripted_engine import ScriptedEngine, answer
from tests.waiting import PATIENCE
from weft.api import content_encoding
from weft.api.app import admission_app, build_app
from weft.api.body import read_body
from weft.api.content_encoding import MAX_ZSTD_PARTS, PIECE_BYTES, answer_encoding, decompressed
from weft.config import load
from weft.errors import InvalidRequest
from weft.options import LimitOptions
from weft.serving.admission import Admission
from weft.serving.rate_limits import Accounts, BodiesOfKey

BODY = json.dumps(HELLO).encode()
MIB = 1 << 20


def bare_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


ENCODERS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZip": gzip.compress,
    "deflate": zlib.compress,
    "deflate ": bare_deflate,
    "zstd": zstandard.ZstdCompressor().compress,
    "identity": bytes,
    "": bytes,
}
DAMAGED = ("gzip", "deflate", "zstd")


def sent(content: bytes, encoding: str, settings: dict[str, Any] | None = None, path: str = CHAT) -> httpx.Response:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    config = load(settings or {}, env={})
    return request(ScriptedEngine(answer("hello")), "POST", path, config, content=content, headers=headers)


@pytest.mark.parametrize("encoding", ENCODERS)
def test_a_compressed_body_is_read(encoding: str) -> None:
    assert sent(ENCODERS[encoding](BODY), encoding).status_code == 200
    assert sent(ENCODERS[encoding](b"[]"), encoding).status_code == 400


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "gzip,identity", "compress", "zlib", "x" * 5000])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/tokenize"])
def test_other_encodings_are_415_and_say_which_are_read(encoding: str, path: str) -> None:
    refused = sent(gzip.compress(gzip.compress(BODY)), encoding, path=path)
    assert (refused.status_code, refused.headers["accept-encoding"]) == (415, "gzip, deflate, zstd")
    assert refused.headers["connection"] == "close"
    message = refused.json()["error"]["message"]
    assert "gzip, deflate, zstd" in message and len(message) < 300


def test_two_headers_are_two_encodings() -> None:
    headers = [("content-type", "application/json"), ("content-encoding", "gzip"), ("content-encoding", "gzip")]
    content = gzip.compress(gzip.compress(BODY))
    assert request(ScriptedEngine(), "POST", CHAT, content=content, headers=headers).status_code == 415


def test_without_the_package_zstd_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_encoding, "HAS_ZSTD", False)
    refused = sent(ENCODERS["zstd"](BODY), "zstd")
    assert (refused.status_code, refused.headers["accept-encoding"]) == (415, "gzip, deflate")
    assert "pip install zstandard" in error_of(refused)["message"]


@pytest.mark.parametrize("encoding", DAMAGED)
@pytest.mark.parametrize("spoil", [
    lambda body: b"no such thing" + body, lambda body: body + b"behind its end",
    lambda body: body + b"\0" * PIECE_BYTES,
], ids=["begin", "longer", "much longer"])  # fmt: skip
def test_a_damaged_body_is_400(encoding: str, spoil: Any) -> None:
    refused = sent(spoil(ENCODERS[encoding](BODY)), encoding)
    assert refused.status_code == 400 and f"not valid {encoding}" in error_of(refused)["message"]


def test_a_body_that_was_cut_is_told_as_such() -> None:
    """Wherever it was cut, but between two frames of zstd, which may be skippable: those are one body."""
    frames = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False)
    first, skippable = frames.compress(BODY[:20]), b"\x50\x2a\x4d\x18\x03\0\0\0any"
    several = first + skippable + frames.compress(BODY[20:])
    assert sent(several, "zstd").status_code == 200
    for encoding, body in [*((name, ENCODERS[name](BODY)) for name in DAMAGED), ("zstd", several)]:
        between = {len(first), len(first + skippable)} if body == several else set()
        for length in {*range(4, len(body))} - between:
            with pytest.raises(InvalidRequest, match=f"truncated.* {encoding}"):
                b"".join(decompressed(encoding, body[:length]))
    refused = sent(ENCODERS["zstd"](BODY)[:-9], "zstd")
    assert refused.status_code == 400 and "truncated" in error_of(refused)["message"]


@pytest.mark.parametrize("part", [b"\0\0\0", b"\x50\x2a\x4d\x18\0\0\0\0"], ids=["blocks", "frames"])
def test_zstd_of_very_many_parts_is_refused(part: bytes) -> None:
    """Each takes a few bytes, and holds nothing."""
    whole = zstandard.ZstdCompressor(write_content_size=False).compress(b"")
    head, end = (whole[: zstandard.frame_header_size(whole)], b"\1\0\0") if len(part) == 3 else (whole, b"")
    with pytest.raises(InvalidRequest, match="frames and blocks"):
        b"".join(decompressed("zstd", head + part * MAX_ZSTD_PARTS + end))


@pytest.mark.parametrize("encoding", DAMAGED)
def test_a_bomb_is_refused_before_it_is_large(encoding: str) -> None:
    """Its bytes are counted as they come out: what is refused was never in memory."""
    bomb = ENCODERS[encoding](b" " * (8 * MIB))
    assert len(bomb) < 100_000
    refused = sent(bomb, encoding, {"max_body_mb": 2})
    assert (refused.status_code, error_of(refused)["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("encoding", DAMAGED)
def test_what_a_body_becomes_has_the_budget_of_bodies(encoding: str) -> None:
    body = b" " * (5 * MIB)
    account = Accounts(LimitOptions(max_inflight_body_mb_per_key=8)).of("")

    async def read() -> bytes:
        async def receive() -> Any:
            return {"type": "http.request", "body": ENCODERS[encoding](body)}

        headers = [(b"content-type", b"application/json"), (b"content-encoding", encoding.encode())]
        return await read_body({"headers": headers}, receive, 32 * MIB, account.hold_body)

    assert asyncio.run(read()) == body and account._bodies.num_bytes == 5 * MIB
    with pytest.raises(BodiesOfKey):
        asyncio.run(read())
    assert account._bodies.num_bytes <= 8 * MIB


def test_what_a_body_becomes_is_no_longer_counted_when_it_was_parsed() -> None:
    config = load({"max_body_mb": 2}, env={})
    admission = Admission(config)
    admission.open(ScriptedEngine(answer("hello")))
    with real_server(admission_app(admission), config) as url:
        for content, status in ((gzip.compress(BODY), 200), (gzip.compress(b" " * (3 * MIB)), 413), (b"x", 400)):
            headers = {"content-type": "application/json", "content-encoding": "gzip"}
            told = httpx.post(url + CHAT, content=content, headers=headers, timeout=PATIENCE)
            assert told.status_code == status
            assert admission._accounts._all_bodies.num_bytes == 0


@pytest.mark.parametrize("encoding", sorted(ENCODERS.keys() - {"", "identity", "GZip", "x-gzip"}))
@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
@pytest.mark.parametrize("filled", [bytes, lambda size: b"0123456789abcdef" * (size // 16) + bytes(size % 16)])
def test_pieces_are_small_and_whole(encoding: str, size: int, filled: Any) -> None:
    data = filled(size)
    pieces = list(decompressed(encoding.strip(), ENCODERS[encoding](data)))
    assert b"".join(pieces) == data and max(map(len, pieces), default=0) <= PIECE_BYTES


def test_a_body_in_zstd_that_wants_much_memory_is_refused() -> None:
    far = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    compressor = zstandard.ZstdCompressor(compression_params=far).compressobj()
    with pytest.raises(InvalidRequest, match="not valid zstd"):
        list(decompressed("zstd", compressor.compress(BODY) + compressor.flush()))


def test_bodies_are_decompressed_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def noted(encoding: str, body: bytes) -> Iterator[bytes]:
        threads.append(threading.get_ident())
        yield from decompressed(encoding, body)

    monkeypatch.setattr("weft.api.body.decompressed", noted)
    assert sent(gzip.compress(BODY), "gzip").status_code == 200
    assert len(threads) == 1 and threads[0] != threading.get_ident()


def test_a_byte_order_mark_is_read_over() -> None:
    mark = b"\xef\xbb\xbf"
    assert sent(mark + BODY, "").status_code == 200
    assert sent(gzip.compress(mark + BODY), "gzip").status_code == 200
    assert sent(mark * 2 + BODY, "").status_code == 400


# Answers.


@pytest.mark.parametrize(
    ("accepts", "encoding"),
    [
        (b"gzip", "gzip"), (b"gzip, deflate, br", "gzip"), (b"gzip, deflate, br, zstd", "zstd"),
        (b"zstd;q=0.5,gzip", "gzip"), (b"GZIP ; Q=0.1", "gzip"),
        (b"*", "gzip"), (b"*;q=0", ""), (b"gzip;q=0", ""), (b"gzip;q=0.0, *", ""),
        (b"identity", ""), (b"br", ""), (b"", ""), (b"gzip;q=x", ""), (b"deflate", ""), (b"gzip;q=1.000", "gzip"),
    ],
)  # fmt: skip
def test_the_client_says_how_its_answer_is_compressed(accepts: bytes, encoding: str) -> None:
    assert answer_encoding(accepts) == encoding


@pytest.fixture(scope="module")
def long_answers() -> Iterator[str]:
    with real_server(build_app(ScriptedEngine(answer("tell me more " * 10_000)), load(env={}))) as url:
        yield url


def asked(url: str, accepts: str, **fields: Any) -> httpx.Response:
    return httpx.post(url + CHAT, json=HELLO | fields, headers={"accept-encoding": accepts}, timeout=PATIENCE)


@pytest.mark.parametrize("accepts", ["gzip", "zstd", "identity"])
def test_a_long_answer_is_compressed(long_answers: str, accepts: str) -> None:
    told = asked(long_answers, accepts)
    assert told.json()["choices"][0]["message"]["content"] == "tell me more " * 10_000
    assert told.headers.get("content-encoding", "identity") == accepts
    assert ("accept-encoding" in told.headers.get("vary", "")) == (accepts != "identity")
    assert (int(told.headers["content-length"]) < 10_000) == (accepts != "identity")


def test_an_answer_in_several_pieces_is_compressed(long_answers: str) -> None:
    told = asked(long_answers, "gzip", n=10)
    assert told.headers["content-encoding"] == "gzip" and told.headers["transfer-encoding"] == "chunked"
    assert [choice["message"]["content"] for choice in told.json()["choices"]] == ["tell me more " * 10_000] * 10


def test_streams_and_short_answers_are_not(long_answers: str) -> None:
    stream = asked(long_answers, "gzip, zstd", stream=True)
    assert "content-encoding" not in stream.headers and len(events(stream)) >= 2
    short = httpx.get(long_answers + "/v1/models", headers={"accept-encoding": "gzip"}, timeout=PATIENCE)
    assert len(short.content) < 1024 and "content-encoding" not in short.headers


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_errors_are_not(path: str) -> None:
    engine = ScriptedEngine([InvalidRequest("wrong " * 300)])
    told = request(engine, "POST", path, json=HELLO | {"max_tokens": 5}, headers={"accept-encoding": "gzip"})
    assert told.status_code == 400 and len(told.content) > 1024 and "content-encoding" not in told.headers


def test_metrics_and_the_interface_s_description_are_compressed(long_answers: str) -> None:
    for path in ("/openapi.json", "/metrics"):
        told = httpx.get(long_answers + path, headers={"accept-encoding": "gzip"}, timeout=PATIENCE)
        assert told.headers["content-encoding"] == "gzip" and len(told.text) > 1024


def test_a_client_of_http_1_0_gets_its_answer_as_it_is() -> None:
    app = build_app(ScriptedEngine(answer("tell me more " * 1000)), load(env={}))
    scope: dict[str, Any] = {
        "type": "http", "http_version": "1.0", "method": "GET", "path": "/openapi.json", "raw_path": b"/openapi.json",
        "root_path": "", "scheme": "http", "query_string": b"", "headers": [(b"accept-encoding", b"gzip")],
    }  # fmt: skip
    told: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        told.append(message)

    asyncio.run(app(scope, receive, send))
    assert b"content-encoding" not in dict(told[0]["headers"]) and json.loads(told[1]["body"])
