"""Requests to engines, in few words."""

from __future__ import annotations

from weft.payloads import NO_CONDITIONING, Conditioning
from weft.types import (
    ChunkSize,
    Embed,
    GenerateImage,
    GenerationRequest,
    ImageParams,
    Pooling,
    Prompt,
    Sample,
    SamplingParams,
)


def sample(
    prompt: Prompt,
    params: SamplingParams | None = None,
    *,
    markers: tuple[str, ...] = (),
    chunk_size: ChunkSize | None = None,
    **fields: object,
) -> GenerationRequest:
    task = Sample(params=params or SamplingParams(), markers=markers, chunk_size=chunk_size)
    return GenerationRequest(prompt=prompt, task=task, **fields)


def embed(prompt: Prompt, pooling: Pooling = Pooling.MEAN, **fields: object) -> GenerationRequest:
    return GenerationRequest(prompt=prompt, task=Embed(pooling), **fields)


def generate_image(
    prompt: list[int], params: ImageParams, conditioning: Conditioning = NO_CONDITIONING, **fields: object
) -> GenerationRequest:
    return GenerationRequest(prompt=prompt, task=GenerateImage(params=params, conditioning=conditioning), **fields)
