"""Tensors that clients send with a request for images."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from weft.config import LimitOptions
from weft.errors import InvalidRequest
from weft.frontend.images.job import ImageJob, Wish, check_allowed, job_of
from weft.frontend.images.schemas import AdditionalInformationField, ImagesRequest, TensorField
from weft.frontend.service import Service
from weft.payloads import AdditionalInformation, InfoEntry, PromptEmbeds, Tensor, entry_field


async def job_from(wish: Wish, service: Service, *, cache_salt: str = "", priority: int = 0) -> ImageJob:
    """As `job_of`."""
    if wish.prompt_embeds is None and wish.additional_information is None:
        return job_of(wish, service.engine, cache_salt=cache_salt, priority=priority)
    # To look at every value takes a while: the streams of others go on meanwhile.
    return await asyncio.to_thread(job_of, wish, service.engine, cache_salt=cache_salt, priority=priority)


async def tensors_of(
    request: ImagesRequest, limits: LimitOptions
) -> tuple[PromptEmbeds | None, AdditionalInformation | None]:
    """As they came in JSON, decoded and not checked yet."""
    embeds, information = request.prompt_embeds, request.additional_information
    check_allowed(limits, prompt_embeds=embeds, additional_information=information)
    return (
        None if embeds is None else PromptEmbeds(**await asyncio.to_thread(_parts, embeds, "prompt_embeds")),
        None if information is None else await asyncio.to_thread(_information, information),
    )


def _information(given: AdditionalInformationField) -> AdditionalInformation:
    entries = {}
    for name, entry in given.entries.items():
        tensor = None if entry.tensor is None else Tensor(**_parts(entry.tensor, f"{entry_field(name)}.tensor"))
        entries[name] = InfoEntry(tensor=tensor, values=None if entry.values is None else [*entry.values])
    return AdditionalInformation(entries=entries)


def _parts(given: TensorField, field: str) -> dict[str, Any]:
    try:
        data = base64.b64decode(given.data, validate=True)
    except ValueError as error:
        raise InvalidRequest(f"{field}.data: it is not base64.", param=f"{field}.data") from error
    return {"data": memoryview(data), "shape": tuple(given.shape), "dtype": given.dtype, "sha256": given.sha256}
