"""What /v1/images/generations answers, as OpenAI's clients read it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from weft.types import Usage


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
    """Which gives this image again."""


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
    """Of the image, from 0."""
    step: int
    steps: int


class ShownImage(Struct, frozen=True, kw_only=True):
    """What the events that show an image have in common."""

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
    """Of all images of one prompt, which counts once."""
    prompt = max(usage.prompt_tokens for usage in usages)
    images = sum(usage.completion_tokens for usage in usages)
    return ImagesUsage(
        input_tokens=prompt,
        input_tokens_details=ImageTokensDetails(image_tokens=0, text_tokens=prompt),
        output_tokens=images,
        output_tokens_details=ImageTokensDetails(image_tokens=images, text_tokens=0),
        total_tokens=prompt + images,
    )
