"""Measures vLLM by its own `LLM` as `weft bench offline` measures an engine, under vLLM's Python:
`python vllm_offline.py WORK`, where WORK is the JSON of what `vllm_gpu.py` asks for. It prints the figures as JSON.

Its interface does not tell when tokens come: decoding is the time for many tokens less that for few. Its token budget
has all prompts computed in a few steps at the beginning, so that this is what steps of a full batch take.

Nothing of Weft is imported: vLLM's environment has packages of its own.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

DECODE_PROMPT_TOKENS = 128


def main() -> None:
    work = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    began = time.perf_counter()
    llm = LLM(**work["engine"])
    chance = random.Random(work["seed"])

    def generate(requests: int, input_tokens: int, output_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        prompts = [
            TokensPrompt(prompt_token_ids=[chance.randrange(10, work["vocabulary"]) for _ in range(input_tokens)])
            for _ in range(requests)
        ]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        counts = {len(output.outputs[0].token_ids) for output in outputs}
        if len(outputs) != requests or counts != {output_tokens}:
            raise RuntimeError(f"asked for {output_tokens} tokens each, got {sorted(counts)}")
        return seconds

    generate(1, 16, 1)
    figures: dict[str, Any] = {"start": time.perf_counter() - began}

    def measure(name: str, once: Callable[[], float]) -> None:
        once()
        runs: list[float] = []
        start = time.perf_counter()
        while len(runs) < work["runs"] or time.perf_counter() - start < work["least_seconds"]:
            runs.append(once())
        figures[name] = {"value": statistics.median(runs), "runs": runs}
        print(name, runs, file=sys.stderr, flush=True)

    def decoding(batch: int) -> Callable[[], float]:
        few, many = (33, 289) if batch == 1 else (17, 145)
        short = math.inf

        def once() -> float:
            nonlocal short
            short = min(short, generate(batch, DECODE_PROMPT_TOKENS, few))
            return batch * (many - few) / (generate(batch, DECODE_PROMPT_TOKENS, many) - short)

        return once

    for batch in work["batch_sizes"]:
        measure(f"decode, batch {batch}", decoding(batch))
    for length in work["prompt_lengths"]:
        measure(f"first token after {length}", lambda length=length: 1000 * generate(1, length, 1))
    requests, inputs, outputs = work["throughput"]
    measure(
        f"{requests} × ({inputs} in, {outputs} out)",
        lambda: requests * outputs / generate(requests, inputs, outputs),
    )
    print("FIGURES", json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
