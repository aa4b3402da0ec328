"""The live view of a real engine at work."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec

from tests.e2e.tiny_server import NAME, TinyServer
from tests.waiting import PATIENCE
from weft.serving.live import Snapshot

KINDS = ("decode", "prefill", "encode", "denoise")


@contextmanager
def at_work(server: TinyServer) -> Iterator[None]:
    """Answers, images and vectors are generated again and again."""
    done = threading.Event()
    asked = {
        "/v1/completions": {"model": NAME, "prompt": "the cat sat on a mat " * 4, "max_tokens": 40, "ignore_eos": True},
        "/v1/images/generations": {"prompt": "a red circle", "num_inference_steps": 10},
        "/v1/embeddings": {"model": NAME, "input": "a secret thing " * 5},
    }

    def ask(path: str) -> None:
        while not done.is_set():
            assert httpx.post(server.url + path, json=asked[path], timeout=PATIENCE).status_code == 200

    threads = [threading.Thread(target=ask, args=(path,)) for path in asked]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join(PATIENCE)


def test_a_real_engine_tells_its_budget_its_blocks_and_its_requests(small_server: TinyServer) -> None:
    unseen = {*KINDS, "in use", "cached", "ttft", "between tokens", "text", "image", "embedding"}
    began = time.time()
    with at_work(small_server), httpx.stream("GET", small_server.url + "/live", timeout=PATIENCE) as response:
        for line in response.iter_lines():
            if not line:
                continue
            assert "secret" not in line and "red circle" not in line
            snapshot = msgspec.json.decode(line.removeprefix("data: "), type=Snapshot)
            [model] = snapshot.models
            assert model.engine == "native" and not model.not_told and model.blocks is not None
            if model.spent is not None:
                unseen -= {kind for kind in KINDS if getattr(model.spent, kind)}
            if model.blocks.used_cells is not None and model.blocks.cached_cells is not None:
                assert len(model.blocks.used_cells) == len(model.blocks.cached_cells) <= 1024
                unseen -= {"in use"} if set(model.blocks.used_cells) > {"0"} else set()
                unseen -= {"cached"} if set(model.blocks.cached_cells) > {"0"} else set()
            unseen -= {"ttft"} if model.ttft is not None else set()
            unseen -= {"between tokens"} if model.inter_token is not None else set()
            # Other tests of this server left some that were aborted.
            for request in [request for request in snapshot.ended if request.began > began]:
                assert request.state in ("stop", "length") and sum(seconds for _, seconds in request.phases) > 0
                unseen.discard(request.kind)
            if not unseen:
                break
    assert not unseen


def test_a_server_that_is_told_to_stop_ends_the_streams_of_its_watchers(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--threads", "1", "--kv-cache-memory-mb", "16", "--data-dir", str(tmp_path))
    with TinyServer(tiny_model, *flags) as server:
        with httpx.stream("GET", server.url + "/live", timeout=PATIENCE) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert all(line.startswith("data: ") for line in rest if line), "the stream ends where an event ends"
        assert server.process.wait(PATIENCE) == 0
