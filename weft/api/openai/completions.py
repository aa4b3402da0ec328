"""POST /v1/completions"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Awaitable, Sequence

import msgspec
from msgspec import UNSET

from weft.api.body import off_loop, parse
from weft.api.openai.chat import ChoicesWriter
from weft.api.openai.logprobs import (
    MANY_FIGURES,
    completion_logprobs,
    echoed_logprobs,
    joined,
    num_figures,
    prompt_logprobs,
)
from weft.api.openai.openai_answers import (
    SYSTEM_FINGERPRINT,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    timings_body,
    with_items,
)
from weft.api.openai.openai_schema import CompletionRequest
from weft.api.translate import ParsedRequest, parse_completion
from weft.backends.contract import Engine, tokens_of
from weft.serving.admission import RequestContext
from weft.serving.output_reader import CollectedOutput
from weft.serving.request import unique_id
from weft.types import GenerationRequest, Output, TokenLogprob


async def completions_endpoint(
    body: bytes, context: RequestContext
) -> tuple[list[GenerationRequest], CompletionWriter]:
    request = await parse(CompletionRequest, body, context)
    served = await context.choose(request.model)
    served.check_model(request.model)
    answer_id = f"cmpl-{request.request_id or uuid.uuid4().hex}"
    completion = await parse_completion(
        request, served, context.fields, request_id=unique_id(answer_id), tenant=context.tenant
    )
    return completion.requests, CompletionWriter(answer_id, request, completion, served.engine)


class CompletionWriter(ChoicesWriter):
    """Writes one answer, with all the choices of every prompt."""

    def __init__(self, answer_id: str, request: CompletionRequest, completion: ParsedRequest, engine: Engine) -> None:
        super().__init__(answer_id, "text_completion", request, completion, engine)
        self._request = request
        choices = range(len(completion.requests))
        self._before_text = [self._before + b'{"index":%d,"text":' % index for index in choices]
        self._after_text = b',"logprobs":null,"finish_reason":null}' + self._after
        self._text_offsets = [0 for _ in choices]
        self._has_begun = [False for _ in choices]
        self._prompt_logprobs: dict[int, Sequence[TokenLogprob]] = {}
        """Logprobs of each prompt: its first choice brings them, before any other choice begins."""
        self._prompt_texts: dict[int, str] = {}
        self._prompt_figures: dict[int, PromptLogprobs] = {}
        self._echoes: dict[int, tuple[CompletionLogprobs, int]] = {}
        """All three are written once for the choices of a prompt, by its number."""
        self._is_simple = not (self._continuous_usage or request.return_token_ids or request.echo)
        """An output of text alone is a chunk of text alone."""

    def chunks(self, index: int, output: Output) -> bytes | Awaitable[bytes]:
        if self._is_simple and not (output.logprobs or output.finish or output.prompt_logprobs):
            return (
                self._before_text[index] + msgspec.json.encode(output.text) + self._after_text if output.text else b""
            )
        self._note(index, output.prompt_logprobs)
        is_first, self._has_begun[index] = not self._has_begun[index], True
        repeats_prompt = is_first and (self._request.echo or index // self._parsed.n in self._prompt_logprobs)
        if repeats_prompt or (output.logprobs and num_figures(output) > MANY_FIGURES):
            return asyncio.to_thread(self._chunk, index, output, is_first=is_first)
        return self._chunk(index, output, is_first=is_first)

    def _chunk(self, index: int, output: Output, *, is_first: bool) -> bytes:
        self._usages[index] = output.usage
        number = index // self._parsed.n
        text = self._shown(output.text)
        choice: dict[str, object] = {"logprobs": None, "finish_reason": output.finish}
        logprobs: CompletionLogprobs | None = None
        if is_first and self._request.echo:
            text = self._prompt_text(number) + text
            logprobs, self._text_offsets[index] = self._echoed(number)
        if output.logprobs and self._shows_answer:
            own, self._text_offsets[index] = self._figures(index, output.token_ids, output.logprobs)
            logprobs = own if logprobs is None else joined(logprobs, own)
        choice["logprobs"] = logprobs
        if is_first and self._request.return_token_ids:
            choice["prompt_token_ids"] = self._prompt(index)
        if self._request.return_token_ids:
            choice["token_ids"] = output.token_ids if self._shows_answer else []
        if is_first and (figures := self._figures_of(number)) is not None:
            choice["prompt_logprobs"] = figures
        if output.finish and output.stop_reason is not None:
            choice["stop_reason"] = output.stop_reason
        if output.timings is not None and self._request.return_timings:
            choice["timings"] = timings_body(output.timings)
        if not (text or logprobs or output.finish or "token_ids" in choice or "prompt_logprobs" in choice):
            return b""
        fields: dict[str, object] = {"usage": self._usage_body(self._usages)} if self._continuous_usage else {}
        rest = b"," + msgspec.json.encode(choice)[1:]
        return self._before_text[index] + msgspec.json.encode(text) + rest + self._after_with(fields)

    async def whole(self, outputs: Sequence[CollectedOutput]) -> list[bytes]:
        is_long = self._request.echo or sum(map(num_figures, outputs)) > MANY_FIGURES
        return await off_loop(is_long, self._whole, outputs)

    def _whole(self, outputs: Sequence[CollectedOutput]) -> list[bytes]:
        answer = Completion(
            id=self.answer_id,
            created=self._created,
            model=self.model_name,
            choices=[],
            usage=self._usage_body([output.usage for output in outputs]),
            system_fingerprint=SYSTEM_FINGERPRINT,
        )
        for made, output in enumerate(outputs):
            self._note(made, output.prompt_logprobs)
        given = enumerate(self._best(outputs))
        return with_items(answer, "choices", (self._choice(index, made, outputs[made]) for index, made in given))

    def _best(self, outputs: Sequence[CollectedOutput]) -> list[int]:
        """Return the places of the answers that are given: the n likeliest of each prompt, by mean log probability."""
        made, n = self._parsed.n, self._request.n
        if made == n:
            return [*range(len(outputs))]

        def likelihood(place: int) -> float:
            figures = outputs[place].logprobs
            return sum(figure.logprob for figure in figures) / len(figures) if figures else -math.inf

        firsts = range(0, len(outputs), made)
        return [i for first in firsts for i in sorted(range(first, first + made), key=likelihood, reverse=True)[:n]]

    def _choice(self, number_given: int, index: int, output: CollectedOutput) -> CompletionChoice:
        """`number_given`: among the choices of the answer; `index`: among those that were made."""
        request = self._request
        number = index // self._parsed.n
        text, logprobs = self._shown(output.text), None
        if request.echo:
            text = self._prompt_text(number) + text
            logprobs, self._text_offsets[index] = self._echoed(number)
        if output.logprobs and request.logprobs is not None and self._shows_answer:
            own, _ = self._figures(index, output.token_ids, output.logprobs)
            logprobs = own if logprobs is None else joined(logprobs, own)
        figures = self._figures_of(number)
        token_ids = output.token_ids if self._shows_answer else []
        return CompletionChoice(
            index=number_given,
            text=text,
            logprobs=logprobs,
            finish_reason=output.finish,
            stop_reason=UNSET if output.stop_reason is None else output.stop_reason,
            prompt_token_ids=self._prompt(index) if request.return_token_ids else UNSET,
            token_ids=token_ids if request.return_token_ids else UNSET,
            prompt_logprobs=UNSET if figures is None else figures,
            timings=timings_body(output.timings) if request.return_timings and output.timings else UNSET,
        )

    @property
    def _shows_answer(self) -> bool:
        """True unless only an echo of the prompt is wanted."""
        return self._request.max_tokens > 0

    def _shown(self, text: str) -> str:
        return text if self._shows_answer else ""

    def _prompt(self, index: int) -> list[int]:
        return tokens_of(self._parsed.requests[index].prompt)

    def _prompt_text(self, number: int) -> str:
        if number not in self._prompt_texts:
            skip = self._request.skip_special_tokens
            prompt = self._prompt(number * self._parsed.n)
            self._prompt_texts[number] = self._engine.text.tokenizer.decode(prompt, skip_special_tokens=skip)
        return self._prompt_texts[number]

    def _note(self, index: int, logprobs: Sequence[TokenLogprob] | None) -> None:
        if logprobs is not None:
            self._prompt_logprobs[index // self._parsed.n] = logprobs

    def _figures_of(self, number: int) -> PromptLogprobs | None:
        """Return the figures of a prompt, if they are wanted, written once for all its choices."""
        logprobs = self._prompt_logprobs.get(number)
        if logprobs is None or self._request.prompt_logprobs is None:
            return None
        if number not in self._prompt_figures:
            prompt = self._prompt(number * self._parsed.n)
            self._prompt_figures[number] = prompt_logprobs(self._engine.text.tokenizer, prompt, logprobs)
        return self._prompt_figures[number]

    def _figures(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> tuple[CompletionLogprobs, int]:
        return completion_logprobs(
            self._engine.text.tokenizer,
            token_ids,
            logprobs,
            self._text_offsets[index],
            as_ids=self._request.return_tokens_as_token_ids,
        )

    def _echoed(self, number: int) -> tuple[CompletionLogprobs | None, int]:
        """Return the figures of a prompt that is echoed, if they are wanted, and the offset of the text behind it."""
        logprobs = self._prompt_logprobs.get(number)
        if logprobs is None or self._request.logprobs is None:
            return None, 0
        if number not in self._echoes:
            as_ids = self._request.return_tokens_as_token_ids
            prompt = self._prompt(number * self._parsed.n)
            self._echoes[number] = echoed_logprobs(self._engine.text.tokenizer, prompt, logprobs, as_ids=as_ids)
        return self._echoes[number]
