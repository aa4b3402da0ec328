"""What a message between the api process and an engine costs in several encodings: python -m tests.wire_costs.

Times are the best of several runs, of encoding and decoding alone: no socket is crossed. msgspec's decoders also check
every type; json's and pickle's loads check nothing, and json's message would still have to be made of what they give.
"""

from __future__ import annotations

import json
import pickle
import timeit
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from weft.engine.wire import FromEngine, StepOutput, Submit, ToEngine
from weft.engine_stats import EngineStats
from weft.types import Event, Request, SamplingParams

STATS = EngineStats(running=32, blocks_total=4096, blocks_used=777, generation_tokens=123_456, steps=9_999)


def _step(num_requests: int) -> StepOutput:
    return StepOutput({f"chatcmpl-{n:032x}": 1000 + n for n in range(num_requests)}, [], STATS)


def _submit(num_tokens: int) -> Submit:
    params = SamplingParams(temperature=0.7, max_tokens=256, seed=1)
    return Submit([Request(request_id=f"chatcmpl-{7:032x}", prompt_token_ids=list(range(num_tokens)), params=params)])


MESSAGES: dict[str, tuple[Any, Any]] = {
    "step, 1 token": (_step(1), FromEngine),
    "step, 32 tokens": (_step(32), FromEngine),
    "step, 256 tokens": (_step(256), FromEngine),
    "prompt of 2,048 tokens": (_submit(2048), ToEngine),
    "image of 512 x 512": (StepOutput({}, [Event(request_id="i", image=bytes(512 * 512 * 3))], STATS), FromEngine),
}
"""Messages, and the union that their reader expects."""

Codec = tuple[Callable[[Any], bytes], Callable[[bytes], Any]]


def codecs(kind: Any) -> dict[str, Codec]:
    """Return the ways to write and read a message of a kind."""
    return {
        "msgspec, msgpack": (msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(kind).decode),
        "msgspec, JSON": (msgspec.json.Encoder().encode, msgspec.json.Decoder(kind).decode),
        "json": (lambda message: json.dumps(msgspec.to_builtins(message)).encode(), json.loads),
        "pickle": (lambda message: pickle.dumps(message, pickle.HIGHEST_PROTOCOL), pickle.loads),
    }


class Cost(Struct, frozen=True):
    num_bytes: int
    encode_us: float
    decode_us: float


def cost_of(message: Any, codec: Codec, seconds: float, repeat: int) -> Cost:
    encode, decode = codec
    written = encode(message)

    def best_us(call: Callable[[], object]) -> float:
        once = max(min(timeit.repeat(call, number=1, repeat=3)), 1e-7)
        number = max(1, int(seconds / once))
        return min(timeit.repeat(call, number=number, repeat=repeat)) / number * 1e6

    return Cost(len(written), best_us(lambda: encode(message)), best_us(lambda: decode(written)))


def measure(seconds: float = 0.003, repeat: int = 80) -> dict[str, dict[str, Cost]]:
    """Return the costs by message and encoding."""
    return {
        name: {codec: cost_of(message, pair, seconds, repeat) for codec, pair in codecs(kind).items()}
        for name, (message, kind) in MESSAGES.items()
    }


def main() -> None:
    table = Table("message", "encoding", "bytes", "encode, µs", "decode, µs", box=None, pad_edge=False)
    for name, costs in measure().items():
        for codec, cost in costs.items():
            table.add_row(name, codec, f"{cost.num_bytes:,}", f"{cost.encode_us:,.1f}", f"{cost.decode_us:,.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
