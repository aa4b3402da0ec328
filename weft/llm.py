"""The Python API: the same engine as the server's, without a server.

from weft import LLM, SamplingParams

with LLM("smollm2") as llm:
    for answer in llm.generate(["The sea is", "The sky is"], SamplingParams(max_tokens=20)):
        print(answer.text)
    llm.draw("a red circle on a blue background").save("circle.png")
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from weft import config as configuration
from weft.backends.contract import Deltas, failure_of
from weft.backends.native import NativeEngine, start_native
from weft.errors import InvalidRequest
from weft.frontend.images.job import Wish, job_of, sides
from weft.frontend.images.picture import Image
from weft.frontend.images.updates import draw
from weft.types import Delta, FinishReason, FlowSampler, ModelInfo, SamplingParams, TokenLogprob, Usage

T = TypeVar("T")
Prompt = str | list[int]
Message = Mapping[str, Any]


class Answer(Struct, frozen=True, kw_only=True):
    text: str
    token_ids: list[int]
    finish: FinishReason
    usage: Usage
    logprobs: list[TokenLogprob] | None = None


class LLM:
    """A model that is loaded and ready. Any setting of `weft serve` is accepted by its name."""

    def __init__(self, model: str = "smollm2", **settings: Any) -> None:
        self._config = configuration.load({"model": model, **settings})
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weft-llm", daemon=True)
        self._thread.start()
        try:
            self._engine: NativeEngine = self._wait(start_native(self._config))
        except BaseException:
            self._stop_loop()
            raise

    @property
    def model(self) -> ModelInfo:
        return self._engine.model

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Answer]:
        """Continue every prompt (text or token ids); the answers come in the order of the prompts."""
        batch = _as_batch(prompts)
        tokens = [self._engine.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in batch]
        return self._answer_all(tokens, params)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Answer]:
        """Answer every conversation, through the model's chat template."""
        batch: Any = [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations
        return self._answer_all([self._engine.encode_chat(messages).token_ids for messages in batch], params)

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> Iterator[Delta]:
        """The answer to one prompt or conversation, as it comes. Leaving the iterator early ends the request."""
        deltas = self._wait(self._engine.submit(self._tokens_of(prompt), params or SamplingParams()))
        try:
            while (delta := self._wait(_next(deltas))) is not None:
                if failure := failure_of(delta):
                    raise failure
                yield delta
        finally:
            self._wait(deltas.aclose())

    def draw(
        self,
        prompt: str,
        *,
        negative_prompt: str = "",
        size: str = "auto",
        steps: int | None = None,
        guidance_scale: float | None = None,
        seed: int | None = None,
        sampler: FlowSampler = "euler",
    ) -> Image:
        """An image of the prompt, by the model that draws beside this one; what is not given is as that has it."""
        width, height = sides(size)
        wish = Wish(
            prompt=prompt,
            negative_prompt=negative_prompt,
            width=width,
            height=height,
            steps=steps,
            guidance_scale=guidance_scale,
            seed=seed,
            sampler=sampler,
        )
        job = job_of(wish, self._engine.model, self._engine.tokenizer)
        return self._wait(draw(self._engine, job, lambda _: None))

    def close(self) -> None:
        if self._thread.is_alive():
            self._wait(self._engine.close())
            self._stop_loop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _tokens_of(self, prompt: Prompt | Sequence[Message]) -> list[int]:
        if isinstance(prompt, str):
            return self._engine.tokenizer.encode(prompt)
        messages = [part for part in prompt if isinstance(part, Mapping)]
        return self._engine.encode_chat(messages).token_ids if messages else [t for t in prompt if isinstance(t, int)]

    def _answer_all(
        self, prompts: list[list[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Answer]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequest(f"{len(params)} sampling parameters for {len(prompts)} prompts.")

        async def all_of_them() -> list[Answer]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(prompt, p)) for prompt, p in zip(prompts, params, strict=True)]
            return [task.result() for task in tasks]

        try:
            return self._wait(all_of_them())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        deltas: list[Delta] = []
        await (await self._engine.submit(prompt, params)).follow(deltas.append)
        last = deltas[-1]
        if failure := failure_of(last):
            raise failure
        assert last.finish is not None
        logprobs = [logprob for delta in deltas for logprob in delta.logprobs or ()]
        return Answer(
            text="".join(delta.text for delta in deltas),
            token_ids=[token for delta in deltas for token in delta.token_ids],
            finish=last.finish,
            usage=last.usage,
            logprobs=logprobs if params.logprobs is not None else None,
        )

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(deltas: Deltas) -> Delta | None:
    return await anext(deltas, None)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
