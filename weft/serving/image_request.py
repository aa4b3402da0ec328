"""Requests for images, the same from every endpoint, and the images that come of them."""

from __future__ import annotations

import asyncio
import re
import secrets
import struct
import zlib
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, get_args

from msgspec import Struct

from weft.backends.contract import Engine, Take, failure_of
from weft.errors import EngineFault, InvalidRequest, ModelNotFound
from weft.options import LimitOptions
from weft.payloads import (
    LATENTS,
    NEGATIVE_PROMPT_EMBEDS,
    PROMPT_EMBEDS,
    SIGMAS,
    TIMESTEPS,
    AdditionalInformation,
    Conditioning,
    PromptEmbeds,
    conditioning_of,
    entry_field,
)
from weft.serving.output_reader import CollectedOutput
from weft.serving.request import check_tensors_allowed, requests_like
from weft.text.tokenizer import Tokenizer
from weft.types import (
    MAX_IMAGE_TEXT,
    FlowSampler,
    GenerateImage,
    GenerationRequest,
    ImageModelInfo,
    ImageParams,
    Output,
)

MAX_PROMPT_CHARS = MAX_IMAGE_TEXT
MAX_IMAGES = 10
MAX_PREVIEWS = 20

AUTO = "auto"
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")


class ImageOptions(Struct, frozen=True, kw_only=True):
    """The fields in which a client describes the images that it asks for; None: as the model has it."""

    prompt: str = ""
    prompt_embeds: PromptEmbeds | None = None
    """Hidden states instead of a prompt."""
    negative_prompt: str = ""
    additional_information: AdditionalInformation | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    seed: int | None = None
    """None: any."""
    sampler: FlowSampler = "euler"
    n: int = 1
    previews: int = 0
    """At most so many on the way to each image, evenly."""


def sides(size: str) -> tuple[int, int] | tuple[None, None]:
    """Return width and height of a size such as 32x32; none for auto."""
    if size == AUTO:
        return None, None
    if (match := _SIZE.fullmatch(size)) is None:
        raise InvalidRequest(
            f"size is {size!r:.40}; it must be auto, or a width and a height as in 32x32.", param="size"
        )
    return int(match[1]), int(match[2])


def sampler_named(name: str) -> FlowSampler:
    known: tuple[FlowSampler, ...] = get_args(FlowSampler)
    for sampler in known:
        if sampler == name:
            return sampler
    raise InvalidRequest(f"sampler is {name!r:.40}; it must be one of {', '.join(known)}.", param="sampler")


def image_model(engine: Engine) -> ImageModelInfo:
    """Return the model that generates images beside the language model. Raises InvalidRequest where there is none."""
    if (found := engine.model.images) is not None:
        return found
    raise InvalidRequest(
        f"{engine.model.name} generates text, and no image model is loaded beside it.",
        hint="The server's --image-model names one; the one that comes with Weft is for smollm2."
        if engine.abilities.images
        else f"The engine {engine.name} generates none; the server's --engine native does.",
        param="model",
    )


def check_image_model(name: str | None, served_name: str, engine: Engine) -> None:
    """Raise unless this is the image model, and not the one beside it, which is served under its own name; None always
    is."""
    model = image_model(engine)
    if name in (None, model.name):
        return
    hint = f"The image model of this server is {model.name!r}."
    if name == served_name:
        raise InvalidRequest(f"The model {name!r} generates text, not images.", hint=hint, param="model")
    raise ModelNotFound(f"There is no model {name!r:.200} here.", hint=hint, param="model")


def check_allowed(limits: LimitOptions, *, prompt_embeds: object, additional_information: object) -> None:
    """Raise InvalidRequest for tensors where none are taken, before they are decoded; None: not given."""
    for field, value in (("prompt_embeds", prompt_embeds), ("additional_information", additional_information)):
        if value is not None:
            check_tensors_allowed(limits, field)


def image_requests(
    options: ImageOptions,
    engine: Engine,
    *,
    request_id: str = "",
    tenant: str = "",
    cache_salt: str = "",
    priority: int = 0,
) -> list[GenerationRequest]:
    """Return a request for each image, every default resolved. Raises InvalidRequest for what this model does not
    generate. Tensors take it a while."""
    model, tokenizer = image_model(engine), engine.text.tokenizer
    guidance = model.guidance_scale if options.guidance_scale is None else options.guidance_scale
    _check_negative(options.negative_prompt, "negative_prompt", guidance)
    known = [name for name in model.inputs if name != PROMPT_EMBEDS]
    conditioning = conditioning_of(options.prompt_embeds, options.additional_information, known=known)
    width, height = _size(options, model)
    steps = _steps(options, conditioning, model)
    _check_conditioning(conditioning, options, model, guidance, steps)
    negative = _tokens("negative_prompt", options.negative_prompt, model, tokenizer) if options.negative_prompt else []
    _check_count("n", options.n, 1, MAX_IMAGES)
    _check_count("partial_images", options.previews, 0, MAX_PREVIEWS)
    params = ImageParams(
        width=width,
        height=height,
        steps=steps,
        guidance_scale=guidance,
        seed=secrets.randbits(63) if options.seed is None else options.seed,
        sampler=options.sampler,
        negative_token_ids=negative,
        prompt_text=options.prompt if model.reads_text else "",
        negative_text=options.negative_prompt if model.reads_text else "",
        preview_every=-(-steps // (options.previews + 1)) if options.previews else 0,
    )
    params.check()
    params.check_read([], reads_text=model.reads_text)
    prompt = _tokens("prompt", options.prompt, model, tokenizer) if conditioning.prompt is None else []
    common = GenerationRequest(
        prompt=prompt,
        task=GenerateImage(params=params, conditioning=conditioning),
        request_id=request_id,
        cache_salt=cache_salt,
        priority=priority,
        tenant=tenant,
    )
    return requests_like(common, [prompt], options.n)


async def image_requests_in_time(options: ImageOptions, engine: Engine, **fields: Any) -> list[GenerationRequest]:
    """Do the same, in a thread where there are tensors: to look at every value takes a while, and the streams of others
    go on meanwhile."""
    if options.prompt_embeds is None and options.additional_information is None:
        return image_requests(options, engine, **fields)
    return await asyncio.to_thread(image_requests, options, engine, **fields)


def _steps(options: ImageOptions, conditioning: Conditioning, model: ImageModelInfo) -> int:
    """Return the number of steps: as asked for, or as many as the client's schedule has."""
    if options.steps is not None:
        return options.steps
    schedules = (conditioning.values(name) for name in (SIGMAS, TIMESTEPS))
    return next((len(schedule) for schedule in schedules if schedule), model.steps)


def _check_conditioning(
    conditioning: Conditioning, options: ImageOptions, model: ImageModelInfo, guidance: float, steps: int
) -> None:
    for field, text, embeds in (
        ("prompt", options.prompt, conditioning.prompt),
        ("negative_prompt", options.negative_prompt, conditioning.negative),
    ):
        if text and embeds is not None:
            raise InvalidRequest(f"{field}: give either that or {field}_embeds.", param=field)
    _check_negative(conditioning.negative, entry_field(NEGATIVE_PROMPT_EMBEDS), guidance)
    if conditioning.tensor(LATENTS) is not None and (options.n > 1 or options.seed is not None):
        wrong = "n" if options.n > 1 else "seed"
        raise InvalidRequest(f"{wrong} has no effect with {LATENTS}: an image begins with them alone.", param=wrong)
    conditioning.check(model.inputs, steps=steps)


def _check_negative(negative: object, field: str, guidance: float) -> None:
    if negative and guidance == 1:
        raise InvalidRequest(f"{field} has no effect with guidance_scale 1: nothing steers away from it.", param=field)


def _size(options: ImageOptions, model: ImageModelInfo) -> tuple[int, int]:
    width = model.width if options.width is None else options.width
    height = model.height if options.height is None else options.height
    if (width, height) != (model.width, model.height):
        raise InvalidRequest(
            f"The size is {width}x{height}; {model.name} generates {model.width}x{model.height}.", param="size"
        )
    return width, height


def _tokens(param: str, text: str, model: ImageModelInfo, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a prompt; none for a model that reads the text itself."""
    if not 0 < len(text) <= MAX_PROMPT_CHARS:
        raise InvalidRequest(f"{param} has {len(text)} characters; it must be 1 to {MAX_PROMPT_CHARS}.", param=param)
    tokens = [] if model.reads_text else tokenizer.encode(text)
    if len(tokens) > model.max_prompt_tokens:
        raise InvalidRequest(
            f"{param} has {len(tokens)} tokens; {model.name} reads at most {model.max_prompt_tokens}.", param=param
        )
    return tokens


def _check_count(param: str, count: int, least: int, most: int) -> None:
    if not least <= count <= most:
        raise InvalidRequest(f"{param} is {count}; it must be {least} to {most}.", param=param)


SIGNATURE = b"\x89PNG\r\n\x1a\n"
RGB_BYTES = 3

_BITS, _TRUECOLOUR, _DEFLATE, _ADAPTIVE, _NOT_INTERLACED = 8, 2, 0, 0, 0
_UNFILTERED = b"\0"


def png(width: int, height: int, rgb: bytes) -> bytes:
    """Return a PNG file of rows of RGB bytes, the topmost first."""
    row_bytes = width * RGB_BYTES
    if width < 1 or height < 1 or len(rgb) != row_bytes * height:
        raise ValueError(f"{len(rgb)} bytes are not an RGB image of {width}x{height}.")
    rows = memoryview(rgb)
    filtered = b"".join(
        part for start in range(0, len(rgb), row_bytes) for part in (_UNFILTERED, rows[start : start + row_bytes])
    )
    head = struct.pack(">IIBBBBB", width, height, _BITS, _TRUECOLOUR, _DEFLATE, _ADAPTIVE, _NOT_INTERLACED)
    return SIGNATURE + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(filtered)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))


class Image(Struct, frozen=True, kw_only=True):
    """An image that was generated."""

    width: int
    height: int
    rgb: bytes
    """Row by row, the topmost first."""

    def png(self) -> bytes:
        return png(self.width, self.height, self.rgb)

    def save(self, path: str | Path) -> None:
        """Write it as a PNG file, whatever the name of the file says."""
        Path(path).write_bytes(self.png())


LARGE_IMAGE_BYTES = 1 << 18
"""Above this an image is compressed in a thread, so that the streams of others go on meanwhile."""


async def png_of(params: ImageParams, output: Output | CollectedOutput) -> bytes:
    """Return the image of an output as a PNG file. Raises EngineFault where there is none."""
    if output.image is None:
        raise EngineFault("The engine ended an image without showing it.")
    image = Image(width=params.width, height=params.height, rgb=output.image)
    return await asyncio.to_thread(image.png) if len(image.rgb) > LARGE_IMAGE_BYTES else image.png()


async def generate_image(engine: Engine, request: GenerationRequest, take: Take = lambda output: None) -> Image:
    """Give every output of a request for an image to `take`, and return the image. Raises the error that it ended with
    instead. Cancelling it ends the request."""
    assert isinstance(request.task, GenerateImage)
    params, last = request.task.params, Output()

    def take_last(output: Output) -> Awaitable[None] | None:
        nonlocal last
        last = output
        return take(output)

    stream = await engine.submit(request)
    try:
        await stream.follow(take_last)
    finally:
        await stream.aclose()
    if failure := failure_of(last):
        raise failure
    if not last.finish:
        raise EngineFault("The engine ended an image without a reason.")
    if last.image is None:
        raise EngineFault("The engine ended an image without showing it.")
    return Image(width=params.width, height=params.height, rgb=last.image)
