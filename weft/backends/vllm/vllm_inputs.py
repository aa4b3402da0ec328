"""Requests in vLLM's own types. This module imports vLLM: it is for the process that vLLM runs in."""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from weft.backends.vllm.sampling_params import prompt_of, sampling_of
from weft.types import Adapter, Request

REFUSALS = (ValueError, VLLMValidationError, VLLMNotFoundError)
"""The errors that vLLM raises for a request that is wrong in itself."""


def tokens_prompt(request: Request) -> Any:
    return tokens_input(prompt_of(request), cache_salt=request.cache_salt or None)


def sampling_params(request: Request) -> Any:
    grammar = request.params.grammar
    return SamplingParams(
        **sampling_of(request),
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(grammar=grammar) if grammar else None,
    )


def adapter_request(adapter: Adapter) -> Any:
    return LoRARequest(lora_name=adapter.name, lora_int_id=adapter.number, lora_path=adapter.path)
