"""One image, from its request to its last update."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from weft.api.grpc.ai_service_pb2 import (
    ClientTensor,
    GenerateImageRequest,
    GenerateImageUpdate,
    InformationEntry,
    InformationValue,
)
from weft.api.grpc.prediction import SERVED_MODEL
from weft.api.openai.images_schema import job_from
from weft.errors import InvalidRequest
from weft.payloads import AdditionalInformation, InfoEntry, PromptEmbeds, Tensor, Value
from weft.serving.admission import RequestContext
from weft.serving.guard import guarded, no_hang_up
from weft.serving.image_generation import Drawing, Finished, Step
from weft.serving.image_request import ImageJob, Wish, check_allowed, check_image_model, sampler_named
from weft.serving.served_model import ServedModel

Send = Callable[[GenerateImageUpdate], Awaitable[None]]

OPTIONAL = ("seed", "steps", "guidance_scale", "width", "height")


class ImageCall:
    def __init__(self, trace_id: str, seat: RequestContext, send: Send, arrived: float) -> None:
        self._trace_id = trace_id
        self._seat = seat
        self._send = send
        self._arrived = arrived
        self._num_updates = 0

    async def run(self, request: GenerateImageRequest) -> None:
        """Send every step, and the image. Raises what is wrong with the request, and the error that the image ends
        with."""
        service = await self._seat.choose_painter(None if request.model_id in SERVED_MODEL else request.model_id)
        job = await image_job(request, service)
        [params] = job.images
        self._seat.answer_id = self._trace_id
        # A client may send the same id twice; the engine must never see it twice.
        drawing = Drawing(job, self._seat, f"rpc-{uuid.uuid4().hex}", self._arrived)

        async def take(_: int, news: Step | Finished) -> None:
            if isinstance(news, Step):
                update = GenerateImageUpdate(step=news.number, image=news.preview or b"")
            else:
                update = GenerateImageUpdate(step=params.steps, image=news.png, end_of_stream=True, seed=params.seed)
            update.steps = params.steps
            await self._update(update)

        with drawing.counted():
            await guarded(
                drawing.run(take),
                no_hang_up,
                aborted=self._seat.aborted,
                timeout_s=service.options.request_timeout_s,
            )

    async def _update(self, update: GenerateImageUpdate) -> None:
        update.trace_id = self._trace_id
        update.index = self._num_updates
        update.elapsed_ms = 1000 * (time.perf_counter() - self._arrived)
        self._num_updates += 1
        await self._send(update)


async def image_job(request: GenerateImageRequest, service: ServedModel) -> ImageJob:
    """The request as the engine understands it; raises what is wrong with it."""
    name = None if request.model_id in SERVED_MODEL else request.model_id
    check_image_model(name, service.model_name, service.engine)
    embeds = PromptEmbeds(**_parts(request.prompt_embeds)) if request.HasField("prompt_embeds") else None
    information = _information(request.additional_information) if request.additional_information else None
    check_allowed(service.limits, prompt_embeds=embeds, additional_information=information)
    given = {name: getattr(request, name) for name in OPTIONAL if request.HasField(name)}
    wish = Wish(
        prompt=request.prompt,
        prompt_embeds=embeds,
        negative_prompt=request.negative_prompt,
        additional_information=information,
        sampler=sampler_named(request.sampler) if request.sampler else "euler",
        previews=request.previews,
        **given,
    )
    return await job_from(wish, service, priority=request.priority)


def _parts(tensor: ClientTensor) -> dict[str, Any]:
    return {
        "data": memoryview(tensor.data),
        "shape": tuple(tensor.shape),
        "dtype": tensor.dtype,
        "sha256": tensor.sha256,
    }


def _information(entries: Mapping[str, InformationEntry]) -> AdditionalInformation:
    return AdditionalInformation(entries={name: _entry(entry) for name, entry in entries.items()})


def _entry(entry: InformationEntry) -> InfoEntry:
    match entry.WhichOneof("form"):
        case "tensor":
            return InfoEntry(tensor=Tensor(**_parts(entry.tensor)))
        case "values":
            return InfoEntry(values=[_value(value) for value in entry.values.values])
        case _:
            return InfoEntry()


def _value(value: InformationValue) -> Value:
    kind = value.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("additional_information has a value that is nothing.", param="additional_information")
    given: Value = getattr(value, kind)
    return given
