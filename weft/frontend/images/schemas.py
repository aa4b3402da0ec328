"""POST /v1/images/generations: OpenAI's request, as far as Weft answers it, and Weft's own additions to it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from weft.frontend.fields import NotYet
from weft.frontend.images.job import AUTO, MAX_IMAGES, MAX_PREVIEWS, MAX_PROMPT_CHARS
from weft.frontend.schemas import Fields
from weft.types import MAX_DENOISE_STEPS, MAX_GUIDANCE, FlowSampler

Base64 = Annotated[str, Field(description="base64 of the values row by row, little-endian.")]


class TensorField(Fields):
    """A tensor from the client."""

    data: Base64
    shape: list[int]
    dtype: Literal["float32", "float16", "bfloat16"]
    sha256: str = Field("", description="Of the bytes, in hexadecimal; checked when it is given.")


class InfoEntryField(Fields):
    """Exactly one of the two."""

    tensor: TensorField | None = None
    values: list[bool | int | float | str] | None = None


class AdditionalInformationField(Fields):
    entries: dict[str, InfoEntryField]


class ImagesRequest(Fields):
    """POST /v1/images/generations"""

    not_yet: ClassVar[NotYet] = {
        "quality": ["auto", "standard"],
        "style": ["natural"],
        "background": ["auto", "opaque"],
        "moderation": ["auto", "low"],
        "output_compression": [100],
        "complexity": [],
        "frame_count": [],
        "frame_duration_ms": [],
        "svg": [],
    }

    prompt: str | None = Field(None, min_length=1, max_length=MAX_PROMPT_CHARS)
    model: str | None = Field(None, description="The model that draws; it may be left out.")
    n: int = Field(1, ge=1, le=MAX_IMAGES, description="Images of the prompt, each with a seed of its own.")
    size: str = Field(AUTO, description="As the model draws: GET /v1/models tells.")
    response_format: Literal["b64_json"] = "b64_json"
    output_format: Literal["png"] = "png"
    stream: bool = Field(False, description="Events: every step, partial images, the images.")
    partial_images: int = Field(0, ge=0, le=MAX_PREVIEWS, description="On the way to each image, at most; with stream.")
    user: str | None = Field(None, description="Accepted, and without meaning here.")
    safety_identifier: str | None = Field(None, description="Accepted, and without meaning here.")

    seed: int | None = Field(None, description="The same seed gives the same image; image i has seed + i.")
    num_inference_steps: int | None = Field(None, ge=1, le=MAX_DENOISE_STEPS)
    guidance_scale: float | None = Field(
        None, ge=0, le=MAX_GUIDANCE, description="How closely the prompt is followed; 1: in half the time."
    )
    negative_prompt: str = Field("", max_length=MAX_PROMPT_CHARS, description="What the image is steered away from.")
    sampler: FlowSampler = "euler"
    priority: int = Field(0, description="Waiting requests of a lower number go first.")
    cache_salt: str = Field("", max_length=256, description="Cached prompts are shared only with the same salt.")
    prompt_embeds: TensorField | None = Field(
        None, description="Instead of a prompt: its hidden states, a row a token."
    )
    additional_information: AdditionalInformationField | None = None

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        if (self.prompt is None) == (self.prompt_embeds is None):
            raise PydanticCustomError("prompt", "give either a prompt or prompt_embeds.", {"field": "prompt"})
        if self.partial_images and not self.stream:
            raise PydanticCustomError("stream", "it needs stream to be true.", {"field": "partial_images"})
        return self
