"""`python -m tests.worker.speculation_speed` measures a model at batch 1 with and without drafts, on text that repeats
and on text that does not. Both are measured in turn: other load on the machine falls on both."""

from __future__ import annotations

import argparse
import statistics
import time

from msgspec.structs import replace

from tests.scheduler.simulation import events_of
from weft.checkpoint.tokenizer_assets import text_assets
from weft.engine.core import EngineCore
from weft.engine_stats import EngineStats
from weft.hub.resolve import resolve
from weft.options import CacheOptions, Config, ModelOptions
from weft.scheduler.scheduler import Scheduler
from weft.text.tokenizer import Tokenizer
from weft.types import Request, SamplingParams
from weft.worker.worker import Worker

NAMES = (
    *("Ada Byron, London", "Grace Hopper, New York", "Alan Turing, Wilmslow", "Edsger Dijkstra, Rotterdam"),
    *("Barbara Liskov, Los Angeles", "Donald Knuth, Stanford", "Margaret Hamilton, Boston", "Tony Hoare, Oxford"),
    *("Frances Allen, Peru", "Ken Thompson, Berkeley"),
)
LIST = "\n".join(f"{i}. {name.replace(',', ' lives in')}." for i, name in enumerate(NAMES, 1))
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TEXTS = {
    "a list to copy": TURN.format(f"Repeat this list, word for word:\n{LIST}") + LIST[:60],
    "a story": TURN.format("Write a long story about a lighthouse keeper and a storm."),
}


def measure(worker: Worker, request: Request, drafts: bool) -> tuple[list[int], float, EngineStats]:
    """Return the answer, its tokens a second behind the first one, and what the engine counted."""
    core = EngineCore(Scheduler(replace(worker.limits, speculates=drafts)), worker.runner)
    core.submit([request])
    tokens: list[int] = []
    began = 0.0
    while core.has_work:
        for event in events_of(core.step()):
            tokens += event.token_ids
        if tokens and not began:
            began = time.perf_counter()
    return tokens, (len(tokens) - 1) / (time.perf_counter() - began), core.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    runs = arguments.runs
    files = resolve(arguments.model, progress=False)
    tokenizer = Tokenizer.from_assets(text_assets(files))
    options = ModelOptions(image_model="none", max_model_len=2048, device=arguments.device)
    worker = Worker(Config(model=options, cache=CacheOptions(num_blocks=256)), files)
    while worker.runner.prepare():
        pass
    for name, text in TEXTS.items():
        for temperature in (0.0, 0.7):
            request = Request(
                request_id="r",
                prompt_token_ids=tokenizer.encode(text),
                params=SamplingParams(temperature=temperature, seed=1, max_tokens=256),
                stop_token_ids=list(tokenizer.eos_token_ids),
            )
            measure(worker, request, drafts=False)
            plain, drafted = [], []
            for _ in range(runs):
                expected, speed, _ = measure(worker, request, drafts=False)
                plain.append(speed)
                tokens, speed, stats = measure(worker, request, drafts=True)
                drafted.append(speed)
                assert tokens == expected, "drafts changed an answer"
            ratio = statistics.median(drafted) / statistics.median(plain)
            print(
                f"{name}, temperature {temperature}: {statistics.median(plain):.0f} tok/s without drafts, "
                f"{statistics.median(drafted):.0f} with, x {ratio:.2f}; {len(tokens)} tokens in {stats.steps} steps, "
                f"{stats.accepted_tokens} of {stats.draft_tokens} drafted tokens right",
                flush=True,
            )


if __name__ == "__main__":
    main()
