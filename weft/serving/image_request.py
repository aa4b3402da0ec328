"""What somebody wants drawn, and what the engine is asked for then: the same from every door."""

from __future__ import annotations

import re
import secrets
import struct
import zlib
from pathlib import Path
from typing import get_args

from msgspec import Struct
from msgspec.structs import replace

from weft.backends.contract import Engine
from weft.errors import InvalidRequest, ModelNotFound
from weft.options import LimitOptions
from weft.payloads import (
    NEGATIVE_PROMPT_EMBEDS,
    NO_TEXTS,
    AdditionalInformation,
    GivenTexts,
    PromptEmbeds,
    entry_field,
    given_texts,
)
from weft.serving.request import nth_seed
from weft.text.tokenizer import Tokenizer
from weft.types import MAX_IMAGE_TEXT, FlowSampler, ImageModelInfo, ImageParams

MAX_PROMPT_CHARS = MAX_IMAGE_TEXT
MAX_IMAGES = 10
MAX_PREVIEWS = 3

AUTO = "auto"
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")


class Wish(Struct, frozen=True, kw_only=True):
    """None: as the model has it."""

    prompt: str = ""
    prompt_embeds: PromptEmbeds | None = None
    """Instead of a prompt."""
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


class ImageJob(Struct, frozen=True, kw_only=True):
    """Images of one prompt."""

    prompt: list[int]
    images: list[ImageParams]
    given: GivenTexts = NO_TEXTS
    """Instead of prompts."""
    cache_salt: str = ""
    priority: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """What is to be read before anything is drawn."""
        return len(self.prompt) + len(self.images[0].negative_token_ids)


def sides(size: str) -> tuple[int, int] | tuple[None, None]:
    """Width and height of a size such as 32x32; none for auto."""
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


def drawing_model(engine: Engine) -> ImageModelInfo:
    if (painter := engine.model.images) is not None:
        return painter
    raise InvalidRequest(
        f"{engine.model.name} writes text, and no model that draws images is loaded beside it.",
        hint="The operator's setting is --image-model; Weft's own goes with the language model smollm2."
        if engine.abilities.images
        else f"The engine {engine.name} draws none. The operator's setting is --engine: native does.",
        param="model",
    )


def check_image_model(name: str | None, served_name: str, engine: Engine) -> None:
    """Raise unless this is the model that draws, and not the one beside it, which is served under its own name; None
    always is."""
    painter = drawing_model(engine)
    if name in (None, painter.name):
        return
    hint = f"This server draws with {painter.name!r}."
    if name == served_name:
        raise InvalidRequest(f"The model {name!r} writes text and draws no images.", hint=hint, param="model")
    raise ModelNotFound(f"There is no model {name!r:.200} here.", hint=hint, param="model")


def check_allowed(limits: LimitOptions, *, prompt_embeds: object, additional_information: object) -> None:
    """To be asked before a tensor is so much as decoded; None: not given."""
    for field, value in (("prompt_embeds", prompt_embeds), ("additional_information", additional_information)):
        if value is not None and not limits.allow_prompt_embeds:
            raise InvalidRequest(
                f"{field}: this server takes no tensors from clients.",
                hint="The operator's setting is --allow-prompt-embeds.",
                param=field,
            )


def job_of(wish: Wish, engine: Engine, *, cache_salt: str = "", priority: int = 0) -> ImageJob:
    """Every default resolved; raises InvalidRequest for what this model does not draw. Tensors take it a while."""
    painter, tokenizer = drawing_model(engine), engine.tokenizer
    guidance = painter.guidance_scale if wish.guidance_scale is None else wish.guidance_scale
    _check_negative(wish.negative_prompt, "negative_prompt", guidance)
    given = given_texts(wish.prompt_embeds, wish.additional_information, known=painter.information)
    _check_given(given, wish, painter, guidance)
    width, height = _size(wish, painter)
    steps = painter.steps if wish.steps is None else wish.steps
    negative = _tokens("negative_prompt", wish.negative_prompt, painter, tokenizer) if wish.negative_prompt else []
    _check_count("n", wish.n, 1, MAX_IMAGES)
    _check_count("partial_images", wish.previews, 0, MAX_PREVIEWS)
    first = ImageParams(
        width=width,
        height=height,
        steps=steps,
        guidance_scale=guidance,
        seed=secrets.randbits(63) if wish.seed is None else wish.seed,
        sampler=wish.sampler,
        negative_token_ids=negative,
        prompt_text=wish.prompt if painter.reads_text else "",
        negative_text=wish.negative_prompt if painter.reads_text else "",
        preview_every=-(-steps // (wish.previews + 1)) if wish.previews else 0,
    )
    first.check()
    first.check_read([], reads_text=painter.reads_text)
    images = [first, *(replace(first, seed=nth_seed(first.seed, number)) for number in range(1, wish.n))]
    return ImageJob(
        prompt=_tokens("prompt", wish.prompt, painter, tokenizer) if given.prompt is None else [],
        images=images,
        given=given,
        cache_salt=cache_salt,
        priority=priority,
    )


def _check_given(given: GivenTexts, wish: Wish, painter: ImageModelInfo, guidance: float) -> None:
    for field, text, embeds in (
        ("prompt", wish.prompt, given.prompt),
        ("negative_prompt", wish.negative_prompt, given.negative),
    ):
        if text and embeds is not None:
            raise InvalidRequest(f"{field}: give either that or {field}_embeds.", param=field)
    _check_negative(given.negative, entry_field(NEGATIVE_PROMPT_EMBEDS), guidance)
    given.check(max_rows=painter.max_prompt_tokens, width=painter.text_width)


def _check_negative(negative: object, field: str, guidance: float) -> None:
    if negative and guidance == 1:
        raise InvalidRequest(f"{field} has no effect with guidance_scale 1: nothing steers away from it.", param=field)


def _size(wish: Wish, painter: ImageModelInfo) -> tuple[int, int]:
    width = painter.width if wish.width is None else wish.width
    height = painter.height if wish.height is None else wish.height
    if (width, height) != (painter.width, painter.height):
        raise InvalidRequest(
            f"The size is {width}x{height}; {painter.name} draws {painter.width}x{painter.height}.", param="size"
        )
    return width, height


def _tokens(param: str, text: str, painter: ImageModelInfo, tokenizer: Tokenizer) -> list[int]:
    """None for a model that reads the text itself."""
    if not 0 < len(text) <= MAX_PROMPT_CHARS:
        raise InvalidRequest(f"{param} has {len(text)} characters; it must be 1 to {MAX_PROMPT_CHARS}.", param=param)
    tokens = [] if painter.reads_text else tokenizer.encode(text)
    if len(tokens) > painter.max_prompt_tokens:
        raise InvalidRequest(
            f"{param} has {len(tokens)} tokens; {painter.name} reads at most {painter.max_prompt_tokens}.", param=param
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
    """A file of rows of RGB bytes, the topmost first."""
    row_bytes = width * RGB_BYTES
    if width < 1 or height < 1 or len(rgb) != row_bytes * height:
        raise ValueError(f"{len(rgb)} bytes are no RGB image of {width}x{height}.")
    rows = memoryview(rgb)
    filtered = b"".join(
        part for start in range(0, len(rgb), row_bytes) for part in (_UNFILTERED, rows[start : start + row_bytes])
    )
    head = struct.pack(">IIBBBBB", width, height, _BITS, _TRUECOLOUR, _DEFLATE, _ADAPTIVE, _NOT_INTERLACED)
    return SIGNATURE + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(filtered)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))


class Image(Struct, frozen=True, kw_only=True):
    width: int
    height: int
    rgb: bytes
    """Row by row, the topmost first."""

    def png(self) -> bytes:
        return png(self.width, self.height, self.rgb)

    def save(self, path: str | Path) -> None:
        """Write it as a PNG file, whatever the name of the file says."""
        Path(path).write_bytes(self.png())
