"""Real servers, edges and replicas whose engine is a script: `python -m tests.cluster.scripted serve|replica ...` is
the command `weft` with an engine process that has no model. It speaks the real wire, steps as long as a GPU would, and
gives every request the tokens that its prompt and their positions make: those of any two engines are the same.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from weft.engine.process import EngineProcess
from weft.engine.wire import Abort, Channel, Ready, Shutdown, Start, StepOutput, Submit, ToEngine
from weft.engine_stats import EngineStats
from weft.types import Event, FinishReason, ModelInfo, Request

MODULE = "tests.cluster.scripted"
STEP_MS = "SCRIPTED_STEP_MS"
"""The variable with the milliseconds of a step, and after a comma those that every request in it adds."""
HOLD = "SCRIPTED_HOLD"
"""The variable with a number of tokens and, after a comma, a file: no request gets more before there is the file."""
NUM_BLOCKS, BLOCK_SIZE = 1 << 16, 16
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def letters_of(prompt: Iterable[int]) -> Iterator[str]:
    """Yield what follows a prompt: letters that its digest chooses, each of which is a token."""
    digest = hashlib.blake2b(repr(list(prompt)).encode(), digest_size=32).digest()
    while True:
        for byte in digest:
            yield LETTERS[byte % len(LETTERS)]
        digest = hashlib.blake2b(digest, digest_size=32).digest()


class _Running(Struct):
    request: Request
    letters: Iterator[str]
    num_made: int
    has_begun: bool = False


class ScriptedSteps:
    """The requests of a scripted engine, and the steps in which they get a token each."""

    def __init__(self, channel: Channel, vocabulary: dict[str, int], hold: str) -> None:
        num_tokens, _, file = hold.partition(",")
        self._hold_at = int(num_tokens)
        self._held_until = Path(file)
        self._channel = channel
        self._vocabulary = vocabulary
        self._running: dict[str, _Running] = {}
        self._steps = self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._running)

    def take(self, message: ToEngine) -> None:
        match message:
            case Submit(requests=requests):
                for request in requests:
                    num_made = len(request.output_token_ids)
                    letters = itertools.islice(letters_of(request.prompt_token_ids), num_made, None)
                    self._running[request.request_id] = _Running(request, letters, num_made)
            case Abort(request_ids=request_ids):
                for request_id in request_ids:
                    self._running.pop(request_id, None)

    def step(self) -> None:
        tokens: dict[str, int] = {}
        events: list[Event] = []
        is_held = bool(self._hold_at) and not self._held_until.exists()
        for request_id, running in list(self._running.items()):
            if is_held and running.num_made >= self._hold_at:
                continue
            token = self._vocabulary[next(running.letters)]
            running.num_made += 1
            if running.num_made == running.request.params.max_tokens:
                del self._running[request_id]
                events.append(Event(request_id=request_id, token_ids=[token], finish=FinishReason.LENGTH))
            elif running.has_begun:
                tokens[request_id] = token
            else:
                running.has_begun = True
                events.append(Event(request_id=request_id, token_ids=[token], cached_tokens=0, queue_seconds=0.0))
        self._steps += 1
        self._num_tokens += len(tokens) + len(events)
        self._channel.send(StepOutput(tokens, events, self.stats()))

    def stats(self) -> EngineStats:
        used = sum(1 + (len(one.request.prompt_token_ids) + one.num_made) // 16 for one in self._running.values())
        return EngineStats(
            running=len(self._running), blocks_total=NUM_BLOCKS, blocks_used=used, steps=self._steps,
            generation_tokens=self._num_tokens,
        )  # fmt: skip


def run_scripted(step_s: float, request_s: float, hold: str, sock: socket.socket) -> None:
    """Serve the api process at a socket to its end."""
    channel = Channel(sock)
    start = channel.inbox.get()
    assert isinstance(start, Start)
    folder = Path(start.files.path)
    facts, tokenizer = (msgspec.json.decode((folder / name).read_bytes()) for name in ("config.json", "tokenizer.json"))
    model = ModelInfo(
        name=start.config.model.served_model_name or start.files.name,
        max_model_len=facts["max_position_embeddings"],
        logits_width=facts["vocab_size"],
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        device="cpu",
        dtype="float32",
    )
    channel.send(Ready(model, EngineStats()))
    steps = ScriptedSteps(channel, tokenizer["model"]["vocab"], hold)
    while not channel.closed.is_set():
        # What comes while a step is under way joins the next one.
        while not len(steps) or not channel.inbox.empty():
            message = channel.inbox.get()
            if message is None or isinstance(message, Shutdown):
                return
            steps.take(message)
        channel.closed.wait(step_s + request_s * len(steps))
        steps.step()


def main() -> None:
    """Run the command `weft`, or, as it starts them, an engine process of it."""
    if sys.argv[1] == "engine":
        step_ms, request_ms, hold, number = sys.argv[2:]
        run_scripted(float(step_ms) / 1000, float(request_ms) / 1000, hold, socket.socket(fileno=int(number)))
        return
    from weft.backends.native import start_native
    from weft.cli.main import main as weft

    script = (*os.environ.get(STEP_MS, "8,0.05").split(","), os.environ.get(HOLD, "0,"))
    assert start_native.__kwdefaults__ is not None
    start_native.__kwdefaults__["launch"] = partial(EngineProcess, sys.executable, "-m", MODULE, "engine", *script)
    weft()


if __name__ == "__main__":
    main()
