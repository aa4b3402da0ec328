"""What dies × what a client is doing: `python -m tests.cluster.kill_matrix`.

Two replicas of a tiny model behind networks that can be cut, and two edges. For every cell a client's request is under
way when the thing dies; its answer is compared with that of a server with an engine of its own. The table says what the
client saw, tokens (or images, vectors, lines) lost and repeated, and the seconds from the death to the end of the
answer. An edge's own streams end with it: there the client sends its request again, to the other edge.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from tests import tiny_models
from tests.cluster.replicas import Edge, Proxy, Replica, key_file
from tests.cluster.streams import CHAT, Following, in_threads, post
from tests.e2e.tiny_server import NAME, TinyServer
from tests.tiny_images import save_image_model
from tests.waiting import PATIENCE, wait_until

FAST = ("--heartbeat-timeout-s", "3")
TOOL = {"type": "function", "function": {"name": "weave", "parameters": {"type": "object", "properties": {}}}}
LONG = {"max_tokens": 1500, "ignore_eos": True}


class Outcome(Struct, frozen=True):
    """What one client saw."""

    saw: str
    lost: int
    repeated: int
    seconds: float


class Cluster(ExitStack):
    """Two replicas, two edges, networks between, and a single server beside them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        model = tiny_models.save_directory("smollm2", folder / "tiny")
        facts = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(facts | {"max_position_embeddings": 1 << 14}))
        images = save_image_model(folder / "dit", 96)
        self.model, self.key, self.folder = model, key_file(folder), folder
        self.flags = ("--image-model", str(images), "--image-checkpoint-steps", "5", *FAST)
        self.single = TinyServer(model, "--tool-style", "hermes", "--threads", "1", *self.flags, *self._data("single"))
        self.enter_context(self.single)
        self.replicas = [self._replica() for _ in range(2)]
        self.proxies = [self.enter_context(Proxy(one.port)) for one in self.replicas]
        self.edges = [self._edge(number) for number in range(2)]

    def mend(self) -> None:
        """Start again what died, and wait until all are connected."""
        for number, replica in enumerate(self.replicas):
            if replica.process.poll() is not None:
                self.replicas[number] = self._replica(port=replica.port)
            replica.process.send_signal(signal.SIGCONT)
        for proxy in self.proxies:
            proxy.resume()
        for number, edge in enumerate(self.edges):
            if edge.process.poll() is not None:
                self.edges[number] = self._edge(number)
        for edge in self.edges:
            edge.wait_connected(2)

    def _replica(self, port: int = 0) -> Replica:
        return self.enter_context(Replica(self.model, self.key, *self.flags, port=port))

    def _edge(self, number: int) -> Edge:
        flags = ("--tool-style", "hermes", *self.flags, *self._data(f"edge-{number}"))
        edge = Edge(self.model, self.key, [proxy.address for proxy in self.proxies], *flags)
        self.enter_context(edge)
        edge.wait_connected(2)
        return edge

    def _data(self, name: str) -> tuple[str, str]:
        (self.folder / name).mkdir(exist_ok=True)
        return "--data-dir", str(self.folder / name)


# What dies. Every request of these clients is on one of the two replicas: two are sent, so that both have one.


def kill_engine(cluster: Cluster) -> None:
    for replica in cluster.replicas:
        os.kill(replica.engine_pid, signal.SIGKILL)


def stop_engine(cluster: Cluster) -> None:
    os.kill(cluster.replicas[0].engine_pid, signal.SIGSTOP)


def kill_replica(cluster: Cluster) -> None:
    cluster.replicas[0].kill()


def stop_replica(cluster: Cluster) -> None:
    cluster.replicas[0].process.send_signal(signal.SIGSTOP)


def reset_network(cluster: Cluster) -> None:
    cluster.proxies[0].reset()


def silence_network(cluster: Cluster) -> None:
    cluster.proxies[0].silence()


def kill_edge(cluster: Cluster) -> None:
    cluster.edges[0].process.kill()
    cluster.edges[0].process.wait(PATIENCE)


DEATHS: dict[str, Callable[[Cluster], None]] = {
    "engine killed": kill_engine,
    "engine stopped": stop_engine,
    "replica killed": kill_replica,
    "replica stopped": stop_replica,
    "network reset": reset_network,
    "network silent": silence_network,
    "edge killed": kill_edge,
}

# What clients do. Each returns the pieces of its answer, whose order and number are compared.


def chat(url: str) -> list[str]:
    stream = Following(url, LONG).ended()
    if stream.error is not None:
        raise ConnectionError(str(stream.error))
    return [token for token, _ in stream.tokens]


def tools(url: str) -> list[str]:
    choice = {"type": "function", "function": {"name": "weave"}}
    prompt = [{"role": "user", "content": "Weave a row. " * 300}]
    body = {"messages": prompt, "tools": [TOOL], "tool_choice": choice, "seed": 5, "max_tokens": 200, "model": NAME}
    answer = post(url, "/v1/chat/completions", body)
    return [json.dumps(call["function"]) for call in answer["choices"][0]["message"]["tool_calls"]]


def image(url: str) -> list[str]:
    body = {"prompt": "a row", "seed": 4, "num_inference_steps": 600, "response_format": "b64_json"}
    return [one["b64_json"] for one in post(url, "/v1/images/generations", body)["data"]]


def embeddings(url: str) -> list[str]:
    # Rounding depends on what shares a step.
    texts = [f"row {number} " * 200 for number in range(24)]
    answer = post(url, "/v1/embeddings", {"model": NAME, "input": texts})
    return [json.dumps([round(value, 3) + 0.0 for value in one["embedding"]]) for one in answer["data"]]


def batch(url: str) -> list[str]:
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": NAME,
                "messages": CHAT["messages"],
                "seed": number,
                "max_tokens": 300,
                "ignore_eos": True,
            },
        }
        for number in range(8)
    ]
    text = "\n".join(map(json.dumps, lines))
    file = httpx.post(
        url + "/v1/files", files={"file": ("batch.jsonl", text)}, data={"purpose": "batch"}, timeout=PATIENCE
    ).json()
    made = post(
        url,
        "/v1/batches",
        {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    )
    done: dict[str, Any] = {}

    def has_ended() -> bool:
        done.update(httpx.get(f"{url}/v1/batches/{made['id']}", timeout=PATIENCE).json())
        return done["status"] in ("completed", "failed", "cancelled", "expired")

    wait_until(has_ended, "the batch's end")
    answers = httpx.get(f"{url}/v1/files/{done['output_file_id']}/content", timeout=PATIENCE).text.splitlines()
    read = [json.loads(line) for line in answers]
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in read}
    return [f"{name}: {texts[name]}" for name in sorted(texts)]


CLIENTS: dict[str, Callable[[str], list[str]]] = {
    "chat stream": chat,
    "tools": tools,
    "image": image,
    "embeddings": embeddings,
    "batch": batch,
}


def run_cell(cluster: Cluster, death: str, client: str, expected: Sequence[str]) -> list[Outcome]:
    """Let something die while two clients' requests are under way, and return what they saw."""
    died: list[float] = []
    ask = CLIENTS[client]

    def kill() -> None:
        # All requests are with replicas, or have been answered: small ones may be quicker than a look at them.
        began = cluster.edges[0].metric("weft_request_success_total")
        wait_until(
            lambda: (
                cluster.edges[0].metric("weft_num_requests_running") >= 2
                or cluster.edges[0].metric("weft_request_success_total") > began
            ),
            "requests under way",
        )
        died.append(time.monotonic())
        DEATHS[death](cluster)

    def one() -> tuple[str, list[str], float]:
        saw = "its answer"
        try:
            answer = ask(cluster.edges[0].url)
        except (httpx.HTTPError, ConnectionError, KeyError):
            saw = "a broken connection; asked again"
            answer = ask(cluster.edges[1].url)
        return saw, answer, time.monotonic()

    *seen, _ = in_threads(one, one, kill)
    return [_outcome(saw, answer, expected, at - died[0]) for saw, answer, at in seen]


def _outcome(saw: str, answer: Sequence[str], expected: Sequence[str], seconds: float) -> Outcome:
    if list(answer) == list(expected):
        return Outcome(saw, 0, 0, seconds)
    return Outcome("ANOTHER ANSWER", max(0, len(expected) - len(answer)), max(0, len(answer) - len(expected)), seconds)


def run(deaths: Sequence[str], clients: Sequence[str], folder: Path) -> dict[tuple[str, str], list[Outcome]]:
    outcomes = {}
    with Cluster(folder) as cluster:
        expected = {client: CLIENTS[client](cluster.single.url) for client in clients}
        for death in deaths:
            for client in clients:
                outcomes[death, client] = run_cell(cluster, death, client, expected[client])
                cluster.mend()
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--death", action="append", choices=list(DEATHS), help="only this; may be repeated")
    parser.add_argument("--client", action="append", choices=list(CLIENTS), help="only this; may be repeated")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run(asked.death or list(DEATHS), asked.client or list(CLIENTS), Path(folder))
    table = Table("what died", "the client's request", "what it saw", "lost", "repeated", "seconds")
    for (death, client), seen in outcomes.items():
        worst = max(seen, key=lambda one: (one.lost, one.repeated, one.saw == "ANOTHER ANSWER", one.seconds))
        table.add_row(
            death, client, worst.saw, str(worst.lost), str(worst.repeated), f"{max(one.seconds for one in seen):.1f}"
        )
    Console(width=120).print(table)
    sys.exit(any(one.saw == "ANOTHER ANSWER" for seen in outcomes.values() for one in seen))


if __name__ == "__main__":
    main()
