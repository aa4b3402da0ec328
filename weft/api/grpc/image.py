"""One image, from its request to its last update."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping

from weft.api.grpc.ai_service_pb2 import (
    GenerateImageRequest,
    GenerateImageUpdate,
    InformationEntry,
    InformationValue,
)
from weft.api.grpc.prediction import SERVED_MODEL, tensor_parts
from weft.errors import InvalidRequest
from weft.payloads import (
    MAX_ENTRIES,
    MAX_VALUES,
    AdditionalInformation,
    InfoEntry,
    PromptEmbeds,
    Tensor,
    Value,
    check_count,
    entry_field,
)
from weft.serving.admission import RequestContext
from weft.serving.generation import Generation
from weft.serving.image_request import (
    ImageOptions,
    check_allowed,
    check_image_model,
    image_requests_in_time,
    png_of,
    sampler_named,
)
from weft.serving.served_model import ServedModel
from weft.types import GenerateImage, GenerationRequest, Output, check_cache_salt

Send = Callable[[GenerateImageUpdate], Awaitable[None]]

OPTIONAL = ("seed", "steps", "guidance_scale", "width", "height")


class ImageCall:
    def __init__(self, trace_id: str, context: RequestContext, send: Send, arrived: float) -> None:
        self._trace_id = trace_id
        self._context = context
        self._send = send
        self._arrived = arrived
        self._num_updates = 0

    async def run(self, request: GenerateImageRequest) -> None:
        """Send every step, and the image. Raises what is wrong with the request, and the error that the image ends
        with."""
        name = None if request.model_id in SERVED_MODEL else request.model_id
        served = await self._context.choose_image_model(name)
        check_image_model(name, served.model_name, served.engine)
        requests = await parse_image(request, served, tenant=self._context.tenant)
        task = requests[0].task
        assert isinstance(task, GenerateImage)
        params = task.params
        self._context.answer_id = self._trace_id
        generation = Generation(requests, self._context, self._arrived, served.model_name)

        async def take(_: int, output: Output) -> None:
            image = b"" if output.image is None and not output.finish else await png_of(params, output)
            if output.finish:
                update = GenerateImageUpdate(step=params.steps, image=image, end_of_stream=True, seed=params.seed)
            else:
                update = GenerateImageUpdate(step=output.denoise_step or 0, image=image)
            update.steps = params.steps
            await self._update(update)

        with generation.counted():
            await self._context.guard(generation.run(take))

    async def _update(self, update: GenerateImageUpdate) -> None:
        update.trace_id = self._trace_id
        update.index = self._num_updates
        update.elapsed_ms = 1000 * (time.perf_counter() - self._arrived)
        self._num_updates += 1
        await self._send(update)


async def parse_image(request: GenerateImageRequest, served: ServedModel, *, tenant: str) -> list[GenerationRequest]:
    """Turn a call for an image into the request to the engine; raises what is wrong with it."""
    check_cache_salt(request.cache_salt)
    given_embeds = request.prompt_embeds if request.HasField("prompt_embeds") else None
    given_information = request.additional_information or None
    check_allowed(served.limits, prompt_embeds=given_embeds, additional_information=given_information)
    embeds = None if given_embeds is None else PromptEmbeds(**tensor_parts(given_embeds, "prompt_embeds"))
    information = None if given_information is None else _information(given_information)
    given = {name: getattr(request, name) for name in OPTIONAL if request.HasField(name)}
    options = ImageOptions(
        prompt=request.prompt,
        prompt_embeds=embeds,
        negative_prompt=request.negative_prompt,
        additional_information=information,
        sampler=sampler_named(request.sampler) if request.sampler else "euler",
        previews=request.previews,
        **given,
    )
    # A client may send the same id twice; the engine must never see it twice.
    request_id = f"rpc-{uuid.uuid4().hex}"
    return await image_requests_in_time(
        options,
        served.engine,
        request_id=request_id,
        tenant=tenant,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


def _information(entries: Mapping[str, InformationEntry]) -> AdditionalInformation:
    check_count("additional_information.entries", "entries", len(entries), MAX_ENTRIES)
    return AdditionalInformation(entries={name: _entry(entry, entry_field(name)) for name, entry in entries.items()})


def _entry(entry: InformationEntry, field: str) -> InfoEntry:
    match entry.WhichOneof("form"):
        case "tensor":
            return InfoEntry(tensor=Tensor(**tensor_parts(entry.tensor, f"{field}.tensor")))
        case "values":
            check_count(f"{field}.values", "values", len(entry.values.values), MAX_VALUES)
            return InfoEntry(values=[_value(value) for value in entry.values.values])
        case _:
            return InfoEntry()


def _value(value: InformationValue) -> Value:
    kind = value.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("additional_information has a value that is nothing.", param="additional_information")
    given: Value = getattr(value, kind)
    return given
