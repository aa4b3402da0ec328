"""Measures chats and images at once in one engine, against each kind alone and against engines that generate whole
images.

The same chats (random prompts, greedy, a fixed number of tokens) and the same images (random prompts, a seed each) are
served in every mode. What came of each, token by token and pixel by pixel, is compared with what came when it was
alone in the engine. Times are taken where tokens and images arrive.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise
from typing import Any

from msgspec import Struct, convert
from msgspec.structs import asdict, replace

from weft.backends.contract import Engine, failure_of
from weft.backends.native import start_native
from weft.bench.datasets import FIRST_TOKEN_ID
from weft.bench.report import environment
from weft.errors import ConfigError
from weft.options import Config
from weft.serving.image_request import generate_image, image_model
from weft.switches import VARIABLE, switched_off
from weft.types import GenerateImage, GenerationRequest, ImageParams, ModelInfo, Output, Sample, SamplingParams

IMAGE_PROMPT_TOKENS = 12


class MixedWork(Struct, frozen=True, kw_only=True):
    """The work to measure."""

    chats: int = 16
    images: int = 8
    input_tokens: int = 32
    max_tokens: int = 64
    steps: int | None = None
    """Denoise steps of an image; None, here and for guidance, for the model's own."""
    guidance: float | None = None
    stagger_s: float = 0.0
    """Seconds between the arrivals of two images. The chats and the first image are there from the beginning."""
    runs: int = 3
    seed: int = 0


class Mode(Struct, frozen=True, kw_only=True):
    """A mode is one way to serve the work."""

    name: str
    chats: bool = False
    images: bool = False
    one_at_a_time: bool = False
    """True when each request is sent when the one before it has ended."""
    images_last: bool = False
    """True when no image is sent before all chats have ended."""
    without: tuple[str, ...] = ()
    """Switches that are off in the engine."""


CHATS_ALONE = Mode(name="chats one at a time", chats=True, one_at_a_time=True)
IMAGES_ALONE = Mode(name="images one at a time", images=True, one_at_a_time=True)
TEXT_ONLY = Mode(name="text only", chats=True)
IMAGES_ONLY = Mode(name="images only", images=True)
TOGETHER = Mode(name="together", chats=True, images=True)

# An image is one piece of work, for which all requests wait.
ONE_WHOLE_IMAGE = ("denoise-steps", "denoise-batches")
WHOLE_IMAGES = ("denoise-steps",)
PEERS = (
    Mode(name="one after the other", chats=True, images=True, images_last=True, without=ONE_WHOLE_IMAGE),
    Mode(name="blocking", chats=True, images=True, without=ONE_WHOLE_IMAGE),
    Mode(name="blocking, batched", chats=True, images=True, without=WHOLE_IMAGES),
)
"""Modes without step scheduling. The last one runs all images that are there as one batch."""
MODES = (CHATS_ALONE, IMAGES_ALONE, TEXT_ONLY, IMAGES_ONLY, TOGETHER, *PEERS)


class MixedFigures(Struct, frozen=True, kw_only=True):
    """The figures of one run of a mode, or the medians of its runs; None where there was nothing of that kind."""

    seconds: float
    output_tokens_per_s: float | None = None
    """Output of all chats, from the beginning to the end of the last."""
    decode_tokens_per_s: float | None = None
    """Output while every chat decodes and, if the mode has images, some of them run."""
    first_token_p50_ms: float | None = None
    first_token_max_ms: float | None = None
    inter_token_p50_ms: float | None = None
    inter_token_p95_ms: float | None = None
    inter_token_max_ms: float | None = None
    images_per_s: float | None = None
    """Images a second, from when the first was sent to the engine."""
    image_p50_s: float | None = None
    """Seconds from an image's arrival, which may be before it is sent to the engine, to its end."""
    image_max_s: float | None = None


class ModeReport(Struct, frozen=True, kw_only=True):
    name: str
    without: list[str]
    """All switches that were off."""
    median: MixedFigures
    spread: float
    """The spread of the seconds: (largest - smallest) / median."""
    same_texts: int | None
    """Chats that gave in every run what they give alone; None when the mode has none."""
    same_images: int | None
    runs: list[MixedFigures]


class Verdict(Struct, frozen=True, kw_only=True):
    """The comparison of chats and images together with the other modes."""

    same_texts: int | None
    same_images: int | None
    inter_token_p95_ratio: float | None
    """The ratio to text only; None for chats of a single token."""
    decode_kept: float | None
    """The share of text only's tokens a second that is kept while images run; None when no chat decoded then."""
    times_as_long: dict[str, float]
    """The seconds of other modes, over those of both together."""


class MixedReport(Struct, frozen=True, kw_only=True):
    model: str
    image_model: str | None
    device: str
    dtype: str
    modes: list[ModeReport]
    verdict: Verdict | None
    """The comparison; None without chats, or without images."""
    environment: dict[str, Any]
    work: MixedWork

    @property
    def all_as_alone(self) -> bool:
        """Return whether every request gave in every mode what it gives alone."""
        work = self.work
        return all(
            mode.same_texts in (None, work.chats) and mode.same_images in (None, work.images) for mode in self.modes
        )


class StepsReport(Struct, frozen=True, kw_only=True):
    """The reports of the same work with images of different numbers of denoise steps."""

    steps: list[int]
    reports: list[MixedReport]


class Chat(Struct):
    """The tokens of one chat, and when they came."""

    asked: float
    token_ids: list[int] = []
    arrivals: list[float] = []
    """The arrival time of each token."""

    def take(self, delta: Output) -> None:
        if failure := failure_of(delta):
            raise failure
        self.token_ids += delta.token_ids
        self.arrivals += [time.perf_counter()] * len(delta.token_ids)


class Picture(Struct, frozen=True, kw_only=True):
    """One generated image, and its times."""

    arrived: float
    asked: float
    """The time when it was sent to the engine."""
    ended: float
    rgb: bytes


class WorkResult(Struct, frozen=True, kw_only=True):
    """The results of all the work, in its order."""

    began: float
    chats: list[Chat]
    images: list[Picture]

    @property
    def texts(self) -> list[list[int]]:
        return [chat.token_ids for chat in self.chats]

    @property
    def pixels(self) -> list[bytes]:
        return [picture.rgb for picture in self.images]


Tick = Callable[[str], None]


def modes_of(work: MixedWork) -> list[Mode]:
    """Return the modes that there is work for."""
    return [mode for mode in MODES if (work.chats or not mode.chats) and (work.images or not mode.images)]


def num_runs(works: Sequence[MixedWork]) -> int:
    """Count the runs of all modes. Those without images are the same for every work."""
    modes = modes_of(works[0])
    return (works[0].runs + 1) * sum(len(works) if mode.images else 1 for mode in modes)


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Switch these off in engines that are started inside the block."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = ",".join([before or "", *names])
    try:
        switched_off(os.environ)
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


async def run_mixed(config: Config, works: Sequence[MixedWork], tick: Tick = lambda name: None) -> list[MixedReport]:
    """Measure every mode with each of these works, which have the same chats. Switches are read when an
    engine starts, so there is one engine for all modes with the same switches. `tick` is called after every run."""
    modes = modes_of(works[0])
    if not modes:
        raise ConfigError("There are neither chats nor images to measure.", hint="Set --chats or --images.")
    served: list[dict[Mode, list[WorkResult]]] = [{} for _ in works]
    for names, group in groupby(modes, key=lambda mode: mode.without):
        alike = list(group)
        with without(*names):
            engine = await start_native(config)
            try:
                while not engine.stats().prepared:
                    await asyncio.sleep(0.05)
                for work, results in zip(works, served, strict=True):
                    bench = _Bench(engine, work)
                    for mode in alike:
                        is_measured = not mode.images and mode in served[0]
                        results[mode] = served[0][mode] if is_measured else await bench.measure(mode, tick)
            finally:
                await engine.close()
    return [_report(engine.model, work, results) for work, results in zip(works, served, strict=True)]


def _report(model: ModelInfo, work: MixedWork, served: dict[Mode, list[WorkResult]]) -> MixedReport:
    reports = _reports(served)
    return MixedReport(
        model=model.name,
        image_model=model.images.name if model.images is not None else None,
        device=model.device,
        dtype=model.dtype,
        modes=reports,
        verdict=_verdict({report.name: report for report in reports}) if work.chats and work.images else None,
        environment=environment(),
        work=work,
    )


class _Bench:
    """The benchmark: the work, and an engine to serve it."""

    def __init__(self, engine: Engine, work: MixedWork) -> None:
        self._engine = engine
        self._work = work
        self._random = random.Random(work.seed)
        self._params = SamplingParams(temperature=0, max_tokens=work.max_tokens, ignore_eos=True)
        self._chats = [self._prompt(work.input_tokens) for _ in range(work.chats)]
        self._images = self._image_requests() if work.images else []
        self._num_served = 0

    async def measure(self, mode: Mode, tick: Tick) -> list[WorkResult]:
        served = []
        for run in range(self._work.runs + 1):
            once = await self._serve(mode)
            # The first run compiles, captures and fills caches; it is not counted.
            if run:
                served.append(once)
            tick(mode.name)
        return served

    async def _serve(self, mode: Mode) -> WorkResult:
        """Serve all the work once, in the way of the mode."""
        self._num_served += 1
        turn = asyncio.Semaphore(1 if mode.one_at_a_time else self._work.chats + self._work.images)
        began = time.perf_counter()

        async def chat(prompt: list[int]) -> Chat:
            async with turn:
                taken = Chat(time.perf_counter())
                request = GenerationRequest(
                    prompt=prompt, task=Sample(params=self._params), cache_salt=str(self._num_served)
                )
                stream = await self._engine.submit(request)
                await stream.follow(taken.take)
                return taken

        async def image(number: int, request: GenerationRequest) -> Picture:
            async with turn:
                arrived = time.perf_counter() if mode.one_at_a_time else began + number * self._work.stagger_s
                await asyncio.sleep(arrived - time.perf_counter())
                asked = time.perf_counter()
                done = await generate_image(self._engine, replace(request, cache_salt=str(self._num_served)))
                return Picture(arrived=arrived, asked=asked, ended=time.perf_counter(), rgb=done.rgb)

        chats = asyncio.gather(*map(chat, self._chats if mode.chats else []))
        if mode.images_last:
            await chats
        images = asyncio.gather(*(image(*numbered) for numbered in enumerate(self._images if mode.images else [])))
        all_chats, all_images = await asyncio.gather(chats, images)
        return WorkResult(began=began, chats=all_chats, images=all_images)

    def _image_requests(self) -> list[GenerationRequest]:
        model, work = image_model(self._engine), self._work
        params = ImageParams(
            width=model.width,
            height=model.height,
            steps=model.steps if work.steps is None else work.steps,
            guidance_scale=model.guidance_scale if work.guidance is None else work.guidance,
            seed=work.seed,
        )
        length = min(IMAGE_PROMPT_TOKENS, model.max_prompt_tokens)
        requests = []
        for number in range(work.images):
            prompt, own = self._prompt(length), replace(params, seed=work.seed + number)
            if model.reads_text:
                prompt, own = [], replace(own, prompt_text=" ".join(map(str, prompt)))
            requests.append(GenerationRequest(prompt=prompt, task=GenerateImage(params=own)))
        return requests

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(FIRST_TOKEN_ID, self._engine.model.logits_width) for _ in range(length)]


def _reports(served: dict[Mode, list[WorkResult]]) -> list[ModeReport]:
    texts = served[CHATS_ALONE][0].texts if CHATS_ALONE in served else []
    pixels = served[IMAGES_ALONE][0].pixels if IMAGES_ALONE in served else []
    reports = []
    for mode, runs in served.items():
        figures = [figures_of(once) for once in runs]
        median, seconds = _median(figures), [each.seconds for each in figures]
        reports.append(
            ModeReport(
                name=mode.name,
                without=sorted(switched_off(os.environ) | set(mode.without)),
                median=median,
                spread=(max(seconds) - min(seconds)) / median.seconds,
                same_texts=_num_same(texts, [once.texts for once in runs]) if mode.chats else None,
                same_images=_num_same(pixels, [once.pixels for once in runs]) if mode.images else None,
                runs=figures,
            )
        )
    return reports


def _num_same(alone: Sequence[object], runs: list[Any]) -> int:
    """Count the requests that gave the same in every run as alone."""
    return sum(all(given == expected for given in all_given) for expected, *all_given in zip(alone, *runs, strict=True))


def figures_of(served: WorkResult) -> MixedFigures:
    began, chats, images = served.began, served.chats, served.images
    chats_end = max((chat.arrivals[-1] for chat in chats), default=began)
    images_end = max((picture.ended for picture in images), default=began)
    first = [1000 * (chat.arrivals[0] - chat.asked) for chat in chats]
    gaps = [1000 * (later - sooner) for chat in chats for sooner, later in pairwise(dict.fromkeys(chat.arrivals))]
    latencies = [picture.ended - picture.arrived for picture in images]
    return MixedFigures(
        seconds=max(chats_end, images_end) - began,
        output_tokens_per_s=sum(map(len, served.texts)) / (chats_end - began) if chats else None,
        decode_tokens_per_s=_decode_speed(chats, images) if chats else None,
        first_token_p50_ms=_quantile(first, 0.5),
        first_token_max_ms=_quantile(first, 1),
        inter_token_p50_ms=_quantile(gaps, 0.5),
        inter_token_p95_ms=_quantile(gaps, 0.95),
        inter_token_max_ms=_quantile(gaps, 1),
        images_per_s=len(images) / (images_end - min(picture.asked for picture in images)) if images else None,
        image_p50_s=_quantile(latencies, 0.5),
        image_max_s=_quantile(latencies, 1),
    )


def _decode_speed(chats: list[Chat], images: list[Picture]) -> float | None:
    start, end = max(chat.arrivals[0] for chat in chats), min(chat.arrivals[-1] for chat in chats)
    if images:
        start = max(start, min(picture.asked for picture in images))
        end = min(end, max(picture.ended for picture in images))
    arrived = sum(start < arrival <= end for chat in chats for arrival in chat.arrivals)
    return arrived / (end - start) if arrived else None


def _quantile(values: list[float], share: float) -> float | None:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def _median(runs: list[MixedFigures]) -> MixedFigures:
    medians: dict[str, float | None] = {}
    for name in asdict(runs[0]):
        known = [value for once in runs if (value := asdict(once)[name]) is not None]
        medians[name] = statistics.median(known) if known else None
    return convert(medians, MixedFigures)


def _verdict(modes: dict[str, ModeReport]) -> Verdict:
    together = modes[TOGETHER.name]
    both, text, images = together.median, modes[TEXT_ONLY.name].median, modes[IMAGES_ONLY.name].median
    seconds = {peer.name: modes[peer.name].median.seconds for peer in PEERS}
    seconds[f"{TEXT_ONLY.name}, then {IMAGES_ONLY.name}"] = text.seconds + images.seconds
    return Verdict(
        same_texts=together.same_texts,
        same_images=together.same_images,
        inter_token_p95_ratio=_ratio(both.inter_token_p95_ms, text.inter_token_p95_ms),
        decode_kept=_ratio(both.decode_tokens_per_s, text.decode_tokens_per_s),
        times_as_long={name: each / both.seconds for name, each in seconds.items()},
    )


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value / base
