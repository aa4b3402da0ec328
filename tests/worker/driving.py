"""Driving a worker as the engine's process does: scheduler, core and runner, without the processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from tests.scheduler.simulation import events_of
from weft.checkpoint.model_files import ModelFiles
from weft.engine.core import EngineCore
from weft.engine_stats import EngineStats
from weft.hub.resolve import resolve
from weft.kernels import REFERENCE
from weft.model.dense import DenseModel
from weft.options import CacheOptions, Config, ModelOptions, SchedulerOptions
from weft.plan import Limits
from weft.scheduler.integrity import check_integrity
from weft.scheduler.scheduler import Scheduler
from weft.types import FinishReason, LatentCheckpoint, Request, SamplingParams, TokenLogprob
from weft.worker import runner as runner_module
from weft.worker.forward_step import Stepper
from weft.worker.rows import RowTable
from weft.worker.runner import Runner
from weft.worker.worker import Worker

MOST_STEPS = 5000


class Output(Struct):
    """What a request brought, all its events together."""

    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    cached_tokens: int = 0
    finish: FinishReason | None = None
    error: str = ""
    prompt_logprobs: list[TokenLogprob] | None = None
    embedding: bytes | None = None
    denoise_steps: list[int] = []
    images: dict[int, bytes] = {}
    """By the number of steps done."""
    checkpoints: dict[int, LatentCheckpoint] = {}
    """The same."""


class Outcome(Struct, frozen=True):
    outputs: dict[str, Output]
    stats: EngineStats

    def tokens(self, request_id: str) -> list[int]:
        return self.outputs[request_id].token_ids


class Driven(Struct, frozen=True):
    """A runner with the limits it was made for: a worker, or a worker's weights under the reference ops."""

    runner: Runner
    limits: Limits


KvDtype = Literal["auto", "fp8", "fp16", "int8"]


def load(
    model: Path | ModelFiles,
    *,
    num_blocks: int = 128,
    max_num_seqs: int = 12,
    max_model_len: int = 256,
    kv_cache_memory_mb: int = 0,
    image_model: Path | None = None,
    draft: Path | None = None,
    kv_cache_dtype: KvDtype = "auto",
) -> Driven:
    files = model if isinstance(model, ModelFiles) else resolve(str(model))
    files = files if draft is None else replace(files, draft=resolve(str(draft)))
    worker = Worker(
        Config(
            model=ModelOptions(
                device="cpu",
                dtype="float32",
                max_model_len=max_model_len,
                image_model="none" if image_model is None else str(image_model),
            ),
            cache=CacheOptions(
                num_blocks=num_blocks, kv_cache_memory_mb=kv_cache_memory_mb, kv_cache_dtype=kv_cache_dtype
            ),
            scheduler=SchedulerOptions(max_num_seqs=max_num_seqs),
        ),
        files,
    )
    # The same chunks in every run: their sizes do not follow the time that steps take.
    return Driven(worker.runner, replace(worker.limits, max_step_seconds=0.0))


def under_reference(driven: Driven) -> Driven:
    """The same weights, with the torch reference for every op and no prepared decode step."""
    loaded, limits = driven.runner.stepper.model, driven.limits
    model = DenseModel(loaded.config, loaded.weights, REFERENCE, limits.max_model_len)
    table = RowTable(limits.max_num_seqs, limits.max_model_len, limits.block_size, torch.device("cpu"))
    return Driven(Runner(Stepper(model, torch.zeros_like(driven.runner.stepper.kv_cache), table)), limits)


def request(name: str, prompt: Sequence[int], max_tokens: int, *, done: Sequence[int] = (), **params: Any) -> Request:
    """Greedy unless `params` says otherwise. `done` are tokens that the user has already."""
    chosen = {"temperature": 0.0, "seed": 0} | params
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        params=SamplingParams(max_tokens=max_tokens, **chosen),
        output_token_ids=list(done),
    )


def run(
    driven: Driven,
    requests: Iterable[Request],
    *,
    later: Iterable[tuple[int, Request]] = (),
    aborts: Iterable[tuple[int, str]] = (),
    overlap: bool = False,
    **limits: Any,
) -> Outcome:
    """Serve requests to their ends with an empty cache. `later` arrive, and `aborts` leave, before the steps of their
    numbers, counted from 0; `limits` are changed from the worker's."""
    scheduler = Scheduler(replace(driven.limits, **limits))
    core = EngineCore(scheduler, driven.runner, overlap=overlap)
    arrivals = sorted([(0, request) for request in requests] + list(later), key=lambda arrival: arrival[0])
    outputs = {request.request_id: Output() for _, request in arrivals}
    step = 0
    while core.has_work or arrivals:
        while arrivals and (arrivals[0][0] <= step or not core.has_work):
            assert core.submit([arrivals.pop(0)[1]]) == []
        for request_id in [name for when, name in aborts if when == step]:
            core.abort([request_id])
            outputs[request_id].finish = FinishReason.ABORT
        for event in events_of(core.step()):
            output = outputs[event.request_id]
            assert output.finish is None, "an event after the last one"
            output.token_ids += event.token_ids
            output.logprobs += event.logprobs or []
            output.cached_tokens = output.cached_tokens if event.cached_tokens is None else event.cached_tokens
            output.finish, output.error = event.finish, event.error
            if event.prompt_logprobs is not None:
                assert output.prompt_logprobs is None and len(output.token_ids) == 1, "not with the first token"
                output.prompt_logprobs = event.prompt_logprobs
            output.embedding = event.embedding
            if event.denoise_step is not None:
                output.denoise_steps.append(event.denoise_step)
                if event.image is not None:
                    output.images[event.denoise_step] = event.image
                if event.checkpoint is not None:
                    output.checkpoints[event.denoise_step] = event.checkpoint
        check_integrity(scheduler)
        step += 1
        assert step < MOST_STEPS, "no end in sight"
    core.settle()
    assert all(output.finish for output in outputs.values())
    return Outcome(outputs, core.stats())


@contextmanager
def watched_logits() -> Iterator[list[Tensor]]:
    """Every step's logits, as the runner gives them to the sampler: [rows that sample, vocabulary]."""
    seen: list[Tensor] = []
    sample = runner_module.sample

    def watching(logits: Tensor, *rest: Any) -> Any:
        seen.append(logits.clone())
        return sample(logits, *rest)

    runner_module.sample = watching
    try:
        yield seen
    finally:
        runner_module.sample = sample
