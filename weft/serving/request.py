"""How the prompts of one call become the requests of its choices."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from msgspec.structs import replace

from weft.types import GenerateImage, GenerationRequest, Prompt, Sample, SamplingParams, Task


def unique_id(answer_id: str) -> str:
    """Return an id for the engine. A client may send the same id twice; the engine must never see it twice."""
    return f"{answer_id}-{uuid.uuid4().hex[:8]}"


def requests_like(common: GenerationRequest, prompts: Sequence[Prompt], n: int = 1) -> list[GenerationRequest]:
    """Return `n` requests for every prompt, one after the other, which differ from `common` in prompt, id and seed.

    The choices of one prompt that are sampled are siblings of its first one, whose cached blocks they share.
    """
    requests: list[GenerationRequest] = []
    is_sampled = isinstance(common.task, Sample)
    for prompt in prompts:
        first_id = ""
        for number in range(n):
            request_id = f"{common.request_id}-{len(requests)}" if common.request_id else ""
            requests.append(
                replace(
                    common,
                    prompt=prompt,
                    task=_nth_task(common.task, number) if number else common.task,
                    request_id=request_id,
                    sibling_of=first_id if is_sampled else "",
                )
            )
            first_id = first_id or request_id
    return requests


def _nth_task(task: Task, number: int) -> Task:
    match task:
        case Sample(params=params):
            return replace(task, params=_nth_params(params, number))
        case GenerateImage(params=image):
            return replace(task, params=replace(image, seed=nth_seed(image.seed, number)))
        case _:
            return task


def _nth_params(params: SamplingParams, number: int) -> SamplingParams:
    """Give a choice its own seed, or all choices would be alike. The prompt's logprobs come with the first choice."""
    seed = None if params.seed is None else nth_seed(params.seed, number)
    return replace(params, seed=seed, prompt_logprobs=None)


def nth_seed(seed: int, number: int) -> int:
    """Return the seed of the answer of this number to one request, within 64 bits."""
    return (seed + number + 2**63) % 2**64 - 2**63
