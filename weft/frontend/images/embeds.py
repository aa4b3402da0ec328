"""Tensors that clients send with a request for images."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from weft.errors import InvalidRequest
from weft.frontend.gate import Service
from weft.frontend.images.job import drawing_model
from weft.frontend.images.schemas import AdditionalInformationField, ImagesRequest, TensorField
from weft.payloads import AdditionalInformation, InfoEntry, PromptEmbeds, Tensor


def check_allowed(field: str, service: Service) -> None:
    """To be asked before a tensor is so much as decoded."""
    if not service.limits.allow_prompt_embeds:
        raise InvalidRequest(
            f"{field}: this server takes no tensors from clients.",
            hint="The operator's setting is --allow-prompt-embeds.",
            param=field,
        )


async def check_payloads(
    embeds: PromptEmbeds | None, information: AdditionalInformation | None, service: Service
) -> None:
    """Raise InvalidRequest for what is wrong with them, and for what is right: no engine draws from them yet."""
    if embeds is None and information is None:
        return
    field = "additional_information" if embeds is None else "prompt_embeds"
    check_allowed(field, service)
    # To look at every value takes a while: the streams of others go on meanwhile.
    if embeds is not None:
        max_rows = drawing_model(service.engine.model).max_prompt_tokens
        await asyncio.to_thread(embeds.check, max_rows=max_rows, width=None)
    if information is not None:
        await asyncio.to_thread(information.check)
    raise InvalidRequest(f"{field}: images are not drawn from it yet.", param=field)


def payloads_of(request: ImagesRequest) -> tuple[PromptEmbeds | None, AdditionalInformation | None]:
    """As they came in JSON."""
    embeds, information = request.prompt_embeds, request.additional_information
    return (
        None if embeds is None else PromptEmbeds(**_parts(embeds, "prompt_embeds")),
        None if information is None else _information(information, "additional_information"),
    )


def _information(given: AdditionalInformationField, field: str) -> AdditionalInformation:
    entries = {}
    for name, entry in given.entries.items():
        place = f"{field}.entries[{name[:40]!r}].tensor"
        tensor = None if entry.tensor is None else Tensor(**_parts(entry.tensor, place))
        entries[name] = InfoEntry(tensor=tensor, values=None if entry.values is None else [*entry.values])
    return AdditionalInformation(entries=entries)


def _parts(given: TensorField, field: str) -> dict[str, Any]:
    try:
        data = base64.b64decode(given.data, validate=True)
    except ValueError as error:
        raise InvalidRequest(f"{field}.data: it is not base64.", param=f"{field}.data") from error
    return {"data": memoryview(data), "shape": tuple(given.shape), "dtype": given.dtype, "sha256": given.sha256}
