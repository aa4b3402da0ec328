"""An edge over replicas answers as a server with an engine of its own does, whatever is asked."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.replicas import PATIENT, Edge, Replica
from tests.cluster.streams import CHAT, Following, in_threads, post
from tests.e2e.tiny_server import ADMIN_KEY, NAME, TinyServer
from tests.tiny_adapters import save_adapter
from tests.tiny_images import save_image_model
from tests.waiting import PATIENCE, wait_until

TOOL = {"type": "function", "function": {"name": "weave", "parameters": {"type": "object", "properties": {}}}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, "stream": False, "stream_options": None, "max_tokens": 40}),
    "several": (
        "/v1/completions",
        {"model": NAME, "prompt": ["Weave", "a row"], "n": 3, "seed": 3, "max_tokens": 20, "ignore_eos": True},
    ),
    "a tool": (
        "/v1/chat/completions",
        {
            "model": NAME,
            "messages": CHAT["messages"],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "weave"}},
            "seed": 5,
            "max_tokens": 60,
        },
    ),
    "vectors": ("/v1/embeddings", {"model": NAME, "input": ["over and under", "row by row"]}),
    "an image": (
        "/v1/images/generations",
        {"prompt": "a row", "seed": 4, "num_inference_steps": 6, "response_format": "b64_json"},
    ),
}
VOLATILE = ("id", "created", "usage", "timings")


@pytest.fixture(scope="module")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_model(tmp_path_factory.mktemp("images") / "tiny-dit", 96)


@pytest.fixture(scope="module")
def flags(image_model: Path) -> tuple[str, ...]:
    return ("--image-model", str(image_model), "--image-checkpoint-steps", "5", *PATIENT)


@pytest.fixture(scope="module")
def replicas(long_model: Path, cluster_key: Path, flags: tuple[str, ...]) -> Iterator[list[Replica]]:
    with Replica(long_model, cluster_key, *flags) as one, Replica(long_model, cluster_key, *flags) as other:
        yield [one, other]


def edge_of(replicas: list[Replica], model: Path, key: Path, *flags: str) -> Edge:
    edge = Edge(model, key, [one.address for one in replicas], "--tool-style", "hermes", *flags)
    edge.wait_connected(len(replicas))
    return edge


@pytest.fixture(scope="module")
def edge(
    replicas: list[Replica],
    long_model: Path,
    cluster_key: Path,
    flags: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Edge]:
    data = str(tmp_path_factory.mktemp("data"))
    admin = ("--admin-key", ADMIN_KEY, "--adapter-root", str(tmp_path_factory.getbasetemp()), "--data-dir", data)
    with edge_of(replicas, long_model, cluster_key, *flags, *admin) as server:
        assert isinstance(server, Edge)
        yield server


@pytest.fixture(scope="module")
def single(long_model: Path, flags: tuple[str, ...]) -> Iterator[TinyServer]:
    with TinyServer(long_model, "--tool-style", "hermes", "--threads", "1", *flags) as server:
        assert isinstance(server, TinyServer)
        yield server


def stable(answer: Any) -> Any:
    """An answer without what differs from one request to the next."""
    if isinstance(answer, dict):
        return {name: stable(value) for name, value in answer.items() if name not in VOLATILE}
    return [stable(item) for item in answer] if isinstance(answer, list) else answer


@pytest.mark.parametrize("kind", ASKED)
def test_answers_are_those_of_a_single_server(kind: str, edge: Edge, single: TinyServer) -> None:
    path, body = ASKED[kind]
    answers = in_threads(*[lambda: post(edge.url, path, body)] * 3)
    assert [stable(answer) for answer in answers] == [stable(post(single.url, path, body))] * 3


def test_two_edges_use_the_same_replicas(
    edge: Edge, replicas: list[Replica], long_model: Path, cluster_key: Path, flags: tuple[str, ...], single: TinyServer
) -> None:
    brief = {"max_tokens": 100}
    expected = Following(single.url, brief).answer()
    with edge_of(replicas, long_model, cluster_key, *flags) as second:
        streams = [Following(url, brief) for url in (edge.url, second.url) * 3]
        streams[1].wait_for(3)
        assert [stream.answer() for stream in streams] == [expected] * 6
        leaving = Following(second.url, {"max_tokens": 5000}).wait_for(3)
        second.process.kill()
        second.process.wait(PATIENCE)
        assert leaving.ended().error is not None, "the streams of an edge end with it"
        # Its requests are aborted at once.
        wait_until(lambda: edge.metric("weft_num_requests_running") == 0, "free replicas")
        assert Following(edge.url, brief).answer() == expected


def test_an_adapter_is_tried_and_used_on_every_replica(
    edge: Edge, single: TinyServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = save_adapter("smollm2", tmp_path_factory.mktemp("adapters") / "legal")
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    loaded = httpx.post(
        edge.url + "/admin/lora/load",
        json={"lora_name": "legal", "lora_path": str(folder)},
        headers=headers,
        timeout=PATIENCE,
    )
    assert loaded.status_code == 200, loaded.text
    plain = Following(edge.url, {"max_tokens": 30}).answer()
    adapted = [Following(edge.url, {"max_tokens": 30, "model": "legal"}) for _ in range(4)]
    (answer,) = {json.dumps(stream.answer()) for stream in adapted}
    assert answer != json.dumps(plain)
    unloaded = httpx.post(
        edge.url + "/admin/lora/unload", json={"lora_name": "legal"}, headers=headers, timeout=PATIENCE
    )
    assert unloaded.status_code == 200, unloaded.text


def test_the_prefix_caches_of_all_are_reset(edge: Edge) -> None:
    in_threads(*[lambda: post(edge.url, *ASKED["chat"])] * 4)
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    done = httpx.post(edge.url + "/admin/cache/reset", headers=headers, timeout=PATIENCE)
    assert done.status_code == 200, done.text
    again = httpx.post(edge.url + "/admin/cache/reset", headers=headers, timeout=PATIENCE)
    assert again.json()["forgotten_blocks"] == 0 < done.json()["forgotten_blocks"]


def test_metrics_tell_of_every_replica(edge: Edge, replicas: list[Replica]) -> None:
    text = edge.get("/metrics").text
    for replica in replicas:
        assert re.search(rf'^weft_replica_ready{{model_name="{NAME}",replica="{replica.address}"}} 1.0$', text, re.M)


def test_requests_of_one_session_run_at_one_replica(edge: Edge, replicas: list[Replica]) -> None:
    """Alone the second of two goes where none is."""
    body = {"model": NAME, "max_tokens": 5000, "ignore_eos": True, "stream": True}

    def running() -> list[float]:
        text = edge.get("/metrics").text
        found = re.findall(r"^weft_replica_requests_running{[^}]*} (\S+)$", text, re.M)
        return sorted(map(float, found))

    for fields, headers, expected in (
        ({}, {}, [1, 1]),
        ({"prompt_cache_key": "s"}, {}, [0, 2]),
        ({}, {"x-session-id": "t"}, [0, 2]),
    ):
        wait_until(lambda: running() == [0, 0], "free replicas")
        reading: list[Iterator[str]] = []
        with ExitStack() as stack:
            for prompt in ("over", "under"):
                asked = {**body, **fields, "prompt": prompt}
                answer = stack.enter_context(
                    httpx.stream("POST", edge.url + "/v1/completions", json=asked, headers=headers, timeout=PATIENCE)
                )
                next(lines := answer.iter_lines())
                reading.append(lines)  # an iterator that goes hangs up
            wait_until(lambda expected=expected: running() == expected, f"{expected} requests")


def test_a_full_replica_refuses_and_the_edge_waits(long_model: Path, cluster_key: Path, single: TinyServer) -> None:
    """What a replica's queue has no room for waits at the edge, whose own queue is what clients are told of."""
    narrow = ("--max-num-seqs", "1", "--max-queued-requests", "1", *PATIENT)
    expected = Following(single.url, {"max_tokens": 40}).answer()
    with Replica(long_model, cluster_key, *narrow) as only:
        with edge_of([only], long_model, cluster_key, *PATIENT) as wide:
            streams = [Following(wide.url, {"max_tokens": 40}) for _ in range(6)]
            assert [stream.answer() for stream in streams] == [expected] * 6
        with edge_of([only], long_model, cluster_key, *PATIENT, "--max-queued-requests", "1") as strict:
            first = Following(strict.url, {"max_tokens": 5000}).wait_for(3)
            only.process.send_signal(signal.SIGSTOP)
            body = {**CHAT, "stream": False, "stream_options": None}
            waiting = Following(strict.url, {"max_tokens": 10})
            wait_until(lambda: strict.metric("weft_num_requests_waiting") >= 1, "a waiting request")
            refused = httpx.post(strict.url + "/v1/chat/completions", json=body, timeout=PATIENCE)
            assert refused.status_code == 429, refused.text
            only.process.send_signal(signal.SIGCONT)
            strict.process.kill()
            strict.process.wait(PATIENCE)
            first.ended()
            waiting.ended()


def test_an_image_goes_on_from_its_checkpoint(edge: Edge, replicas: list[Replica], single: TinyServer) -> None:
    """The last of these tests: it leaves one replica alone."""
    path, body = "/v1/images/generations", {"prompt": "a row", "seed": 4, "num_inference_steps": 300}
    expected = stable(post(single.url, path, body))

    def kill_the_first() -> None:
        wait_until(lambda: edge.metric("weft_images_running") >= 2, "images under way")
        replicas[0].kill()

    answers = in_threads(*[lambda: post(edge.url, path, body)] * 2, kill_the_first)[:2]
    assert [stable(answer) for answer in answers] == [expected] * 2
    assert edge.metric("weft_requests_moved_total") > 0
