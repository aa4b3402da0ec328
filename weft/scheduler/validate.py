"""The engine's own validation of a request: a limit never exists at an endpoint only."""

from __future__ import annotations

from collections.abc import Mapping

from weft.errors import InvalidRequest
from weft.payloads import DIGEST_BYTES, Conditioning, check_total_bytes, not_with_embeds
from weft.plan import ImageLimits, Limits
from weft.scheduler.cursors import Cursor
from weft.types import ImageParams, Request, check_priority, check_token_ids


def check_request(request: Request, limits: Limits, cursors: Mapping[str, Cursor]) -> None:
    """Raise InvalidRequest for a request that cannot be served within these limits beside the open ones."""
    request.params.check()
    request.params.check_token_ids(limits.logits_width)
    check_token_ids(request.stop_token_ids, limits.logits_width, "stop_token_ids")
    check_token_ids(request.prompt_token_ids, limits.logits_width, "prompt")
    check_token_ids(request.output_token_ids, limits.logits_width, "output_token_ids")
    if request.request_id in cursors:
        raise InvalidRequest(f"There is a request {request.request_id!r} already.")
    check_priority(request.priority)
    _check_sibling(request, cursors.get(request.sibling_of))
    _check_length(request, limits)
    wants_tokens = bool(request.output_token_ids) or request.params.prompt_logprobs is not None
    if request.pooling is not None and wants_tokens:
        raise InvalidRequest("A request for a vector has no tokens, and no log probabilities.", param="pooling")
    if request.image is None and request.conditioning != Conditioning():
        raise InvalidRequest("Only requests for images have conditioning.", param="prompt_embeds")
    if request.embeds:
        _check_embeds(request, limits)
    if request.image is not None:
        if wants_tokens or request.pooling is not None or request.sibling_of or request.params.grammar:
            raise InvalidRequest("A request for an image has no tokens, no vector and no siblings.", param="image")
        if request.adapter is not None:
            raise InvalidRequest("Adapters are for text: an image cannot be generated with one.", param="adapter")
        if limits.image is None:
            raise InvalidRequest("This engine has no image model.", param="image")
        _check_image(request, request.image, limits, limits.image)


def _check_sibling(request: Request, leader: Cursor | None) -> None:
    if leader is None:
        return
    theirs = leader.request
    ours = (request.prompt_digest, request.cache_salt, request.adapter)
    if ours != (theirs.prompt_digest, theirs.cache_salt, theirs.adapter):
        raise InvalidRequest(
            f"{request.request_id!r} is no sibling of {leader.id!r}: prompt, cache salt or adapter differ.",
            param="sibling_of",
        )


def _check_length(request: Request, limits: Limits) -> None:
    length = len(request.prompt_token_ids)
    if length == 0 and request.image is None:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    if length >= limits.max_model_len:
        raise InvalidRequest(
            f"The prompt has {length} tokens; the context of {limits.max_model_len} tokens must also hold "
            "at least one of the answer.",
            param="prompt",
        )
    max_output = min(request.params.max_tokens or limits.max_model_len, limits.max_model_len - length)
    if len(request.output_token_ids) >= max_output:
        raise InvalidRequest("The request has all its tokens already.", param="max_tokens")


def _check_embeds(request: Request, limits: Limits) -> None:
    """Raise InvalidRequest for rows that this engine cannot put in the place of a prompt's tokens."""
    if request.image is not None or request.pooling is not None:
        raise InvalidRequest("Only requests for tokens have prompt embeds among token ids.", param="prompt_embeds")
    if request.params.prompt_logprobs is not None:
        raise not_with_embeds("prompt_logprobs")
    check_total_bytes([segment.embeds for segment in request.embeds])
    stop = 0
    for segment in request.embeds:
        segment.embeds.check(max_rows=limits.max_model_len - 1, width=limits.embeds_width)
        if not stop <= segment.start <= segment.stop <= len(request.prompt_token_ids):
            raise InvalidRequest("prompt_embeds: its rows are not at positions of the prompt.", param="prompt_embeds")
        if len(segment.digests) != segment.embeds.shape[0] * DIGEST_BYTES:
            raise InvalidRequest("prompt_embeds: it does not have a digest of each row.", param="prompt_embeds")
        stop = segment.stop
    if (given := request.tensor_bytes) > limits.max_client_bytes:
        raise InvalidRequest(
            f"The prompt embeds have {given} bytes; there are {limits.max_client_bytes} for those of all requests "
            "(--max-embedding-mb).",
            param="prompt_embeds",
        )


def _check_image(request: Request, image: ImageParams, limits: Limits, image_limits: ImageLimits) -> None:
    image.check()
    if (image.width, image.height) != (image_limits.width, image_limits.height):
        raise InvalidRequest(
            f"The size is {image.width}x{image.height}; this model makes {image_limits.width}x{image_limits.height}.",
            param="size",
        )
    image.check_read(request.prompt_token_ids, reads_text=image_limits.reads_text)
    prompts = (("prompt", request.prompt_token_ids), ("negative_prompt", image.negative_token_ids))
    check_token_ids(image.negative_token_ids, limits.logits_width, "negative_prompt")
    most = min(image_limits.max_prompt_tokens, limits.max_model_len - 1)
    for param, token_ids in prompts:
        if len(token_ids) > most:
            raise InvalidRequest(f"{param} has {len(token_ids)} tokens; this model takes at most {most}.", param=param)
    if (cost := image_limits.cost(image)) > limits.max_num_batched_tokens:
        raise InvalidRequest(
            f"A step of this image counts as {cost} tokens; a step of the engine has at most "
            f"{limits.max_num_batched_tokens}.",
            param="image",
        )
    request.check_given(image, image_limits.inputs)
    if request.checkpoint is not None and not 0 < request.checkpoint.step < image.steps:
        raise InvalidRequest(f"A checkpoint after {request.checkpoint.step} of {image.steps} steps.", param="image")
    if (given := request.conditioning.num_bytes) > image_limits.max_client_bytes:
        raise InvalidRequest(
            f"The tensors of this image have {given} bytes; there are {image_limits.max_client_bytes} for all tensors "
            "(--max-embedding-mb).",
            param="prompt_embeds",
        )
