"""The prompts of one call, also those in which prompt embeds stand among token ids, and the requests they become."""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from weft.backends.contract import Engine, check_takes_embeds, max_encoded_tokens
from weft.errors import InvalidRequest
from weft.options import FieldMode, LimitOptions
from weft.payloads import PromptEmbeds, check_total_bytes
from weft.types import GenerateImage, GenerationRequest, MixedPrompt, Prompt, Sample, SamplingParams, Task

MAX_FIELDS_TOLD = 32
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


class FieldReport(Struct, eq=False):
    """Reports the fields of one request that are not honoured."""

    mode: FieldMode = "standard"
    without_effect: dict[str, bool] = {}
    """Fields that were accepted and change nothing, each as `interface.field`; false: no interface has such a field."""

    def leave_aside(self, field: str, *, known: bool = True) -> None:
        """Take note of a field. A name that is not known is the client's own text: only a plain one is told."""
        if len(self.without_effect) < MAX_FIELDS_TOLD and _FIELD_NAME.fullmatch(field):
            self.without_effect[field] = known

    def ignore(self, interface: str, field: str, why: str) -> None:
        """Take note of a field that is honoured elsewhere and changes nothing here. Raises InvalidRequest where fields
        are strict."""
        if self.mode == "strict":
            raise InvalidRequest(f"{field} has no effect: {why}.", param=field)
        self.leave_aside(f"{interface}.{field}")

    def rename(self, interface: str, names: Mapping[str, str]) -> None:
        """Call fields of a chat by the names of another interface, whose request became that chat."""

        def renamed(field: str) -> str:
            asked, _, name = field.partition(".")
            return f"{interface}.{names.get(name, name)}" if asked == "chat" else field

        self.without_effect = {renamed(field): known for field, known in self.without_effect.items()}

    @property
    def names(self) -> list[str]:
        """The fields without effect, each once, without their interface."""
        return [*dict.fromkeys(field.partition(".")[2] for field in self.without_effect)]

    @property
    def told(self) -> str:
        """The fields without effect as a header tells them; empty: there are none."""
        return ", ".join(self.names)


def unique_id(answer_id: str) -> str:
    """Return an id for the engine. A client may send the same id twice; the engine must never see it twice."""
    return f"{answer_id}-{uuid.uuid4().hex[:8]}"


def requests_like(common: GenerationRequest, prompts: Sequence[Prompt], n: int = 1) -> list[GenerationRequest]:
    """Return `n` requests for every prompt, one after the other, which differ from `common` in prompt, id and seed.

    The choices of one prompt that are sampled are siblings of its first one, whose cached blocks they share.
    """
    requests: list[GenerationRequest] = []
    is_sampled = isinstance(common.task, Sample)
    for prompt in prompts:
        first_id = ""
        for number in range(n):
            request_id = f"{common.request_id}-{len(requests)}" if common.request_id else ""
            requests.append(
                replace(
                    common,
                    prompt=prompt,
                    task=_nth_task(common.task, number) if number else common.task,
                    request_id=request_id,
                    sibling_of=first_id if is_sampled else "",
                )
            )
            first_id = first_id or request_id
    return requests


def _nth_task(task: Task, number: int) -> Task:
    match task:
        case Sample(params=params):
            return replace(task, params=_nth_params(params, number))
        case GenerateImage(params=image):
            return replace(task, params=replace(image, seed=nth_seed(image.seed, number)))
        case _:
            return task


def _nth_params(params: SamplingParams, number: int) -> SamplingParams:
    """Give a choice its own seed, or all choices would be alike. The prompt's logprobs come with the first choice."""
    seed = None if params.seed is None else nth_seed(params.seed, number)
    return replace(params, seed=seed, prompt_logprobs=None)


def nth_seed(seed: int, number: int) -> int:
    """Return the seed of the answer of this number to one request, within 64 bits."""
    return (seed + number + 2**63) % 2**64 - 2**63


NamedEmbeds = tuple[str, PromptEmbeds]
"""A tensor, and the field of the request that it came in."""
PromptPart = list[int] | NamedEmbeds


def check_tensors_allowed(limits: LimitOptions, field: str) -> None:
    """Raise InvalidRequest for the field of a tensor where none are taken, before it is decoded."""
    if not limits.allow_prompt_embeds:
        raise InvalidRequest(
            f"{field}: this server takes no tensors from clients.",
            hint="The operator's setting is --allow-prompt-embeds.",
            param=field,
        )


def check_embeds_taken(engine: Engine, limits: LimitOptions, field: str) -> None:
    """Raise InvalidRequest for prompt embeds where none are taken, before they are decoded."""
    check_tensors_allowed(limits, field)
    check_takes_embeds(engine, field)


def mixed_prompt(parts: Sequence[PromptPart], engine: Engine) -> MixedPrompt:
    """Join token ids and tensors, after a look at every value of these. It takes a while, and may run in a thread."""
    model = engine.model
    named = [part for part in parts if isinstance(part, tuple)]
    check_total_bytes([embeds for _, embeds in named], named[0][0])
    for field, embeds in named:
        embeds.check(max_rows=max(0, model.max_model_len - 1), width=model.embeds_width, field=field)
    return MixedPrompt.of(part[1] if isinstance(part, tuple) else part for part in parts)


class MarkedTensors:
    """Tensors that stand in the messages of a chat. A mark stands for each while the chat template is rendered, and the
    text around it is encoded by itself."""

    def __init__(self) -> None:
        # A client that could guess the mark could have its text taken for it.
        self._secret = secrets.token_hex(16)
        self._tensors: list[NamedEmbeds] = []

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def mark(self, field: str, embeds: PromptEmbeds) -> str:
        """Return the text that stands for a tensor."""
        self._tensors.append((field, embeds))
        return f"{self._secret}x{len(self._tensors) - 1}x"

    def prompt_of(self, text: str, engine: Engine) -> MixedPrompt:
        """Return the prompt of a text with marks in it. Raises InvalidRequest where one is not there exactly once."""
        pieces = re.split(f"{self._secret}x([0-9]+)x", text)
        numbers = [int(number) for number in pieces[1::2]]
        if sorted(numbers) != [*range(len(self._tensors))]:
            raise InvalidRequest(
                "The model's chat template does not write every part of the messages exactly once: prompt embeds "
                "cannot be placed.",
                param="messages",
            )
        encode, most = engine.text.tokenizer.encode, max_encoded_tokens(engine)
        parts: list[PromptPart] = []
        for number, piece in zip([-1, *numbers], pieces[::2], strict=True):
            if number >= 0:
                parts.append(self._tensors[number])
            if piece:
                parts.append(encode(piece, add_special_tokens=False, max_tokens=most))
        return mixed_prompt(parts, engine)
