"""`python -m tests.worker.draft_model_speed FOLDER` measures what a draft model brings at batch 1, and what it costs
when it is wrong, for the shape in the folder's config.json.

Weights are random. The layers behind the first few add nothing, and the draft model is those first ones: both models
agree but for rounding, as no trained pair does. Then the draft model's output is turned round, and nothing is right.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

from tests.scheduler.simulation import events_of
from weft.checkpoint.model_files import dummy_files
from weft.engine.core import EngineCore
from weft.engine_stats import EngineStats
from weft.options import CacheOptions, Config, ModelOptions
from weft.scheduler.scheduler import Scheduler
from weft.types import Request, SamplingParams
from weft.worker.worker import Worker


def load(folder: Path, num_layers: int, device: str) -> Worker:
    """A model of which the first layers alone do something, and a draft model of these."""
    with tempfile.TemporaryDirectory() as small:
        config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": num_layers}
        (Path(small) / "config.json").write_text(json.dumps(config))
        options = ModelOptions(image_model="none", max_model_len=1024, device=device, speculative_model=small)
        files = replace(dummy_files(folder), draft=dummy_files(Path(small)))
        worker = Worker(Config(model=options, cache=CacheOptions(num_blocks=256)), files)
    assert worker.runner.draft_model is not None
    weights, draft = worker.runner.stepper.model.weights, worker.runner.draft_model.stepper.model.weights
    for layer in weights.layers[num_layers:]:
        layer.output.zero_()
        layer.down.zero_()
    for ours, theirs in zip(weights.all_weights(), draft.all_weights(), strict=False):
        theirs.copy_(ours)
    while worker.runner.prepare():
        pass
    return worker


def measure(worker: Worker, temperature: float, drafts: bool) -> tuple[list[int], float, EngineStats]:
    """Return the answer, its tokens a second behind the first one, and what the engine counted."""
    limits = replace(worker.limits, speculates=drafts, enable_prefix_caching=False)
    core = EngineCore(Scheduler(limits), worker.runner, overlap=worker.info.device != "cpu")
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=256)
    core.submit([Request(request_id="r", prompt_token_ids=[(7 * i) % 1000 for i in range(128)], params=params)])
    tokens, began = list[int](), 0.0
    while core.has_work:
        for event in events_of(core.step()):
            tokens += event.token_ids
        began = began or (time.perf_counter() if tokens else 0.0)
    return tokens, (len(tokens) - 1) / (time.perf_counter() - began), core.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draft-layers", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    worker = load(arguments.folder, arguments.draft_layers, arguments.device)
    assert worker.runner.draft_model is not None
    for kind in ("agrees", "is wrong"):
        if kind == "is wrong":
            worker.runner.draft_model.stepper.model.weights.norm.neg_()
        for temperature in (0.0, 0.7):
            speeds: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(1 + arguments.runs):
                answers = {}
                for drafts in speeds:
                    answers[drafts], speed, stats = measure(worker, temperature, drafts)
                    speeds[drafts] += [speed] if turn else []
            same = sum(one == other for one, other in zip(answers[False], answers[True], strict=True))
            plain, drafted = (statistics.median(speeds[drafts]) for drafts in (False, True))
            print(
                f"a draft model that {kind}, temperature {temperature}: {plain:.0f} tok/s without, {drafted:.0f} with, "
                f"x {drafted / plain:.2f}; {stats.steps} steps, {stats.accepted_tokens} of {stats.draft_tokens} "
                f"drafted tokens right; {same} of {len(answers[True])} tokens the same",
                flush=True,
            )


if __name__ == "__main__":
    main()
