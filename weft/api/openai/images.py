"""POST /v1/images/generations"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence

import msgspec

from weft.api.body import parse
from weft.api.error_responses import error_body
from weft.api.handler import Writer, named_event
from weft.api.openai.images_schema import (
    CompletedImage,
    DrawnImage,
    ImageProgress,
    ImagesAnswer,
    ImagesRequest,
    PartialImage,
    images_usage,
    tensors_of,
)
from weft.errors import WeftError
from weft.serving.admission import RequestContext
from weft.serving.image_request import ImageOptions, check_image_model, image_requests_in_time, png_of, sides
from weft.serving.output_reader import CollectedOutput
from weft.types import GenerateImage, GenerationRequest, ImageParams, Output, check_priority


async def images_endpoint(body: bytes, context: RequestContext) -> tuple[list[GenerationRequest], ImagesWriter]:
    request = await parse(ImagesRequest, body, context)
    served = await context.choose_image_model(request.model)
    check_image_model(request.model, served.model_name, served.engine)
    check_priority(request.priority)
    embeds, information = await tensors_of(request, served.limits)
    width, height = sides(request.size)
    options = ImageOptions(
        prompt=request.prompt or "",
        prompt_embeds=embeds,
        negative_prompt=request.negative_prompt,
        additional_information=information,
        width=width,
        height=height,
        steps=request.num_inference_steps,
        guidance_scale=request.guidance_scale,
        seed=request.seed,
        sampler=request.sampler,
        n=request.n,
        previews=request.partial_images,
    )
    answer_id = f"img-{uuid.uuid4().hex}"
    requests = await image_requests_in_time(
        options,
        served.engine,
        request_id=answer_id,
        tenant=context.tenant,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )
    return requests, ImagesWriter(answer_id, served.model_name, requests, stream=request.stream)


class ImagesWriter(Writer):
    def __init__(self, answer_id: str, model_name: str, requests: Sequence[GenerationRequest], *, stream: bool) -> None:
        super().__init__(answer_id, model_name, stream=stream)
        self._images: list[ImageParams] = [
            request.task.params for request in requests if isinstance(request.task, GenerateImage)
        ]
        self._size = f"{self._images[0].width}x{self._images[0].height}"
        self._created = int(time.time())
        self._num_partial = [0] * len(requests)

    async def chunks(self, index: int, output: Output) -> bytes:
        """Tell of every step; behind it stands the image as it is then, where there is one."""
        params = self._images[index]
        step = params.steps if output.finish else output.denoise_step
        events = b"" if step is None else _event(ImageProgress(index=index, step=step, steps=params.steps))
        if output.finish:
            return events + _event(self._completed(index, await png_of(params, output), output))
        return events if output.image is None else events + _event(self._partial(index, await png_of(params, output)))

    def failure(self, error: WeftError) -> bytes:
        return named_event("error", error_body(error))

    async def whole(self, outputs: Sequence[CollectedOutput]) -> bytes:
        data = [
            DrawnImage(b64_json=_base64(await png_of(params, output)), seed=params.seed)
            for params, output in zip(self._images, outputs, strict=True)
        ]
        usage = images_usage([output.usage for output in outputs])
        return msgspec.json.encode(ImagesAnswer(created=self._created, data=data, size=self._size, usage=usage))

    def _partial(self, index: int, png: bytes) -> PartialImage:
        number = self._num_partial[index]
        self._num_partial[index] += 1
        return PartialImage(
            index=index,
            b64_json=_base64(png),
            created_at=int(time.time()),
            size=self._size,
            partial_image_index=number,
        )

    def _completed(self, index: int, png: bytes, output: Output) -> CompletedImage:
        return CompletedImage(
            index=index,
            b64_json=_base64(png),
            created_at=int(time.time()),
            size=self._size,
            seed=self._images[index].seed,
            usage=images_usage([output.usage]),
        )


def _event(body: ImageProgress | PartialImage | CompletedImage) -> bytes:
    return named_event(body.type, body)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
