"""Seconds until `weft serve DIR --device cuda` is ready, and the first tokens of requests that are sent from then on:
`python3 -m tests.gpu.bench_first_tokens DIR`. The kernels are those of WEFT_COMPILE_CACHE's folder."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from weft.bench.http import Address
from weft.bench.http_load import exchange
from weft.bench.serve import own_server

SECONDS = 6.0
LENGTHS = (128, 20, 700, 5, 300, 1500, 128, 2000)


async def main(folder: str) -> None:
    flags = [folder, "--device", "cuda", "--engine", "native"]
    if not any(Path(folder).glob("*.safetensors")):
        flags += ["--load-format", "dummy"]
    async with own_server(flags) as (url, seconds):
        print(f"ready after {seconds:.2f} s", flush=True)
        address, began, number = Address.parse(url), time.perf_counter(), 0
        worst = 0.0
        while time.perf_counter() - began < SECONDS:
            length = LENGTHS[number % len(LENGTHS)]
            prompt = [(number * 7919 + i * 31) % 30000 + 10 for i in range(length)]
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0 if number % 2 == 0 else 0.8}
            sent = time.perf_counter()
            _, answer = await exchange(address, "POST", "/v1/completions", json.dumps(body).encode())
            took = time.perf_counter() - sent
            assert json.loads(answer)["choices"], answer
            if number < 10 or took > 0.1:
                print(f"  at {sent - began:6.2f} s, {length:5} tokens: {1000 * took:7.1f} ms", flush=True)
            worst, number = max(worst, took), number + 1
        print(f"{number} requests, the slowest took {1000 * worst:.0f} ms")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
