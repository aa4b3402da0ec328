"""POST /v1/images/generations: OpenAI's request, as far as Weft answers it, and Weft's own additions to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from msgspec import Struct
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from weft.api.body import Fields
from weft.api.openai.openai_schema import Items, Name, Pairs, TensorField, at_most, tensor_fields
from weft.options import LimitOptions
from weft.payloads import (
    MAX_VALUES,
    AdditionalInformation,
    InfoEntry,
    PromptEmbeds,
    Tensor,
    entry_field,
)
from weft.serving.image_request import (
    AUTO,
    MAX_IMAGES,
    MAX_PREVIEWS,
    MAX_PROMPT_CHARS,
    check_allowed,
)
from weft.types import MAX_DENOISE_STEPS, MAX_GUIDANCE, FlowSampler, Usage


class InfoEntryField(Fields):
    """Exactly one of the two."""

    tensor: TensorField | None = None
    values: Annotated[Items[bool | int | float | str] | None, at_most(MAX_VALUES, "values")] = None


class AdditionalInformationField(Fields):
    entries: Pairs[InfoEntryField]


class ImagesRequest(Fields):
    """POST /v1/images/generations"""

    place: ClassVar[str] = "images"

    prompt: str | None = Field(None, min_length=1, max_length=MAX_PROMPT_CHARS)
    model: Name | None = Field(None, description="The model that draws; it may be left out.")
    n: int = Field(1, ge=1, le=MAX_IMAGES, description="Images of the prompt, each with a seed of its own.")
    size: str = Field(AUTO, description="As the model draws: GET /v1/models tells.")
    response_format: Literal["b64_json"] = "b64_json"
    output_format: Literal["png"] = "png"
    stream: bool = Field(False, description="Events: every step, partial images, the images.")
    partial_images: int = Field(0, ge=0, le=MAX_PREVIEWS, description="On the way to each image, at most; with stream.")

    seed: int | None = Field(None, description="The same seed gives the same image; image i has seed + i.")
    num_inference_steps: int | None = Field(None, ge=1, le=MAX_DENOISE_STEPS)
    guidance_scale: float | None = Field(
        None, ge=0, le=MAX_GUIDANCE, description="How closely the prompt is followed; 1: in half the time."
    )
    negative_prompt: str = Field("", max_length=MAX_PROMPT_CHARS, description="What the image is steered away from.")
    sampler: FlowSampler = "euler"
    priority: int = Field(0, description="Of a key's waiting requests those of a lower number go first.")
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


class ImageTokensDetails(Struct, frozen=True, kw_only=True):
    image_tokens: int
    text_tokens: int


class ImagesUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: ImageTokensDetails
    output_tokens: int
    output_tokens_details: ImageTokensDetails
    total_tokens: int


class DrawnImage(Struct, frozen=True, kw_only=True):
    b64_json: str
    seed: int
    """The seed that gives this image again."""


class ImagesAnswer(Struct, frozen=True, kw_only=True):
    created: int
    background: str = "opaque"
    data: list[DrawnImage]
    output_format: str = "png"
    size: str
    usage: ImagesUsage


class ImageProgress(Struct, frozen=True, kw_only=True):
    """Weft's own event: so many of an image's steps are done."""

    type: str = "image_generation.progress"
    index: int
    """Index of the image, from 0."""
    step: int
    steps: int


class ShownImage(Struct, frozen=True, kw_only=True):
    """The fields that the events which show an image have in common."""

    index: int
    b64_json: str
    created_at: int
    size: str
    background: str = "opaque"
    output_format: str = "png"
    quality: str = "auto"


class PartialImage(ShownImage, frozen=True, kw_only=True):
    type: str = "image_generation.partial_image"
    partial_image_index: int


class CompletedImage(ShownImage, frozen=True, kw_only=True):
    type: str = "image_generation.completed"
    seed: int
    usage: ImagesUsage


def images_usage(usages: Sequence[Usage]) -> ImagesUsage:
    """Return the usage of all images of one prompt, which counts once."""
    prompt = max(usage.prompt_tokens for usage in usages)
    images = sum(usage.completion_tokens for usage in usages)
    return ImagesUsage(
        input_tokens=prompt,
        input_tokens_details=ImageTokensDetails(image_tokens=0, text_tokens=prompt),
        output_tokens=images,
        output_tokens_details=ImageTokensDetails(image_tokens=images, text_tokens=0),
        total_tokens=prompt + images,
    )


async def tensors_of(
    request: ImagesRequest, limits: LimitOptions
) -> tuple[PromptEmbeds | None, AdditionalInformation | None]:
    """Return the tensors of a request, decoded from JSON and not checked yet."""
    embeds, information = request.prompt_embeds, request.additional_information
    check_allowed(limits, prompt_embeds=embeds, additional_information=information)
    return (
        None if embeds is None else PromptEmbeds(**await asyncio.to_thread(tensor_fields, embeds, "prompt_embeds")),
        None if information is None else await asyncio.to_thread(_information, information),
    )


def _information(given: AdditionalInformationField) -> AdditionalInformation:
    entries = {}
    for name, entry in given.entries.items():
        tensor = None if entry.tensor is None else Tensor(**tensor_fields(entry.tensor, f"{entry_field(name)}.tensor"))
        entries[name] = InfoEntry(tensor=tensor, values=None if entry.values is None else [*entry.values])
    return AdditionalInformation(entries=entries)
