"""The Python API: the same engine as the server's, without a server.

from weft import LLM, SamplingParams

with LLM("smollm2") as llm:
    for answer in llm.generate(["The sea is", "The sky is"], SamplingParams(max_tokens=20)):
        print(answer.text)
    llm.draw("a red circle on a blue background").save("circle.png")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from weft import config as configuration
from weft.backends.blocking import BlockingEngine
from weft.backends.contract import chat_prompt, text_prompt
from weft.backends.failover import start_engine
from weft.checkpoint.adapter_files import adapter_settings
from weft.errors import InvalidRequest
from weft.payloads import AdditionalInformation, PromptEmbeds
from weft.serving.image_request import Image, ImageOptions, check_allowed, generate_image, image_requests, sides
from weft.serving.request import PromptPart, check_embeds_taken, mixed_prompt
from weft.types import (
    FinishReason,
    FlowSampler,
    GenerationRequest,
    ModelInfo,
    Output,
    Sample,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from weft.types import Prompt as EnginePrompt

Rows = NDArray[np.floating[Any]] | PromptEmbeds
"""Prompt embeds: a row of the model's hidden size for each token; an array has float32 or float16."""
Prompt = str | Sequence[int] | NDArray[np.integer[Any]] | Rows | Sequence[int | Rows]
"""Text, token ids, prompt embeds, or a list of token ids with prompt embeds among them."""
Message = Mapping[str, Any]
PROMPTS = "a prompt is text, token ids (whole numbers), prompt embeds (an array of rows) or messages."


class Answer(Struct, frozen=True, kw_only=True):
    """The whole answer to one prompt."""

    text: str
    token_ids: list[int]
    finish: FinishReason
    usage: Usage
    logprobs: list[TokenLogprob] | None = None


class LLM:
    """A model that is loaded and ready. Any setting of `weft serve` is accepted by its name."""

    def __init__(self, model: str = "smollm2", *, adapters: Mapping[str, str] | None = None, **settings: Any) -> None:
        """Load a model. `adapters` are LoRA directories by the names that requests give, besides the setting
        `adapter`."""
        if adapters:
            settings["adapter"] = [*settings.get("adapter", ()), *adapter_settings(adapters)]
        config = configuration.load({"model": model, **settings})
        self._blocking = BlockingEngine(lambda: start_engine(config))
        self._engine = self._blocking.engine
        self._limits = config.limits

    @property
    def model(self) -> ModelInfo:
        return self._engine.model

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Answer]:
        """Continue every prompt (text, token ids, or prompt embeds, which may stand among token ids and are taken with
        `allow_prompt_embeds`); the answers come in the order of the prompts. An array of rows is one prompt."""
        return self._answer_all([self._prompt_of(prompt) for prompt in _as_batch(prompts)], params, adapter)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Answer]:
        """Answer every conversation, through the model's chat template."""
        batch: Any = [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations
        return self._answer_all([chat_prompt(self._engine, messages) for messages in batch], params, adapter)

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Iterator[Output]:
        """Return the answer to one prompt or conversation, as it comes. Leaving the iterator early ends the request."""
        return self._blocking.follow(self._request_of(self._prompt_of(prompt), params or self._usual, adapter))

    def draw(
        self,
        prompt: str = "",
        *,
        prompt_embeds: PromptEmbeds | None = None,
        negative_prompt: str = "",
        additional_information: AdditionalInformation | None = None,
        size: str = "auto",
        steps: int | None = None,
        guidance_scale: float | None = None,
        seed: int | None = None,
        sampler: FlowSampler = "euler",
    ) -> Image:
        """Generate an image of the prompt with the image model beside this one, whose defaults are taken for what is
        not given. Tensors instead of prompts are taken with `allow_prompt_embeds`."""
        check_allowed(self._limits, prompt_embeds=prompt_embeds, additional_information=additional_information)
        width, height = sides(size)
        options = ImageOptions(
            prompt=prompt,
            prompt_embeds=prompt_embeds,
            negative_prompt=negative_prompt,
            additional_information=additional_information,
            width=width,
            height=height,
            steps=steps,
            guidance_scale=guidance_scale,
            seed=seed,
            sampler=sampler,
        )
        [request] = image_requests(options, self._engine)
        return self._blocking.wait(generate_image(self._engine, request))

    @property
    def _usual(self) -> SamplingParams:
        """The parameters of a request without any: those that the model's files recommend."""
        return self._engine.text.sampling_defaults.params()

    def close(self) -> None:
        self._blocking.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _prompt_of(self, prompt: Prompt | Sequence[Message]) -> EnginePrompt:
        if isinstance(prompt, str):
            return text_prompt(self._engine, prompt)
        if _is_rows(prompt):
            return self._mixed_prompt([prompt])
        if not isinstance(prompt, Iterable):
            raise InvalidRequest(f"{prompt!r:.200} is not a prompt: {PROMPTS}")
        parts: list[Any] = list(prompt)
        is_chat = bool(parts) and isinstance(parts[0], Mapping)
        if not is_chat and any(map(_is_rows, parts)):
            return self._mixed_prompt(parts)
        for part in parts:
            if not (isinstance(part, Mapping) if is_chat else _is_token_id(part)):
                raise InvalidRequest(f"{part!r:.200} is not a {'message' if is_chat else 'token id'}: {PROMPTS}")
        return chat_prompt(self._engine, parts) if is_chat else [int(token) for token in parts]

    def _mixed_prompt(self, parts: list[Any]) -> EnginePrompt:
        check_embeds_taken(self._engine, self._limits, "prompt_embeds")
        joined: list[PromptPart] = []
        for place, part in enumerate(parts):
            if isinstance(part, PromptEmbeds | np.ndarray):
                embeds = part if isinstance(part, PromptEmbeds) else PromptEmbeds.of(part)
                joined.append((f"prompt[{place}]", embeds))
            elif _is_token_id(part):
                joined.append([int(part)])
            else:
                raise InvalidRequest(f"{part!r:.200} is not a token id: {PROMPTS}")
        return mixed_prompt(joined, self._engine)

    def _answer_all(
        self,
        prompts: list[EnginePrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | None,
    ) -> list[Answer]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or self._usual] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequest(f"{len(params)} sampling parameters for {len(prompts)} prompts.")
        requests = [self._request_of(prompt, each, adapter) for prompt, each in zip(prompts, params, strict=True)]
        answers = self._blocking.collect(requests)
        return [_answer(outputs, each) for outputs, each in zip(answers, params, strict=True)]

    def _request_of(self, prompt: EnginePrompt, params: SamplingParams, adapter: str | None) -> GenerationRequest:
        params.check()
        if self._engine.abilities.tokens:
            params.check_token_ids(self._engine.model.logits_width)
        return GenerationRequest(prompt=prompt, task=Sample(params=params), adapter=adapter)


def _answer(outputs: list[Output], params: SamplingParams) -> Answer:
    last = outputs[-1]
    assert last.finish is not None
    logprobs = [logprob for output in outputs for logprob in output.logprobs or ()]
    return Answer(
        text="".join(output.text for output in outputs),
        token_ids=[token for output in outputs for token in output.token_ids],
        finish=last.finish,
        usage=last.usage,
        logprobs=logprobs if params.logprobs is not None else None,
    )


def _is_token_id(part: object) -> bool:
    return isinstance(part, Integral) and not isinstance(part, bool)


def _is_rows(part: object) -> bool:
    return isinstance(part, PromptEmbeds) or (
        isinstance(part, np.ndarray) and part.ndim == 2 and np.issubdtype(part.dtype, np.floating)
    )


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return prompts as a list. Rows alone are a prompt each, and rows among token ids belong to one."""
    if isinstance(prompts, str | PromptEmbeds) or _is_rows(prompts):
        return [prompts]  # type: ignore[list-item]
    begins_one = len(prompts) > 0 and (isinstance(prompts[0], Integral) or _is_rows(prompts[0]))
    if begins_one and any(isinstance(part, Integral) for part in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)
