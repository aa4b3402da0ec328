"""Prompts in which rows of prompt embeds stand among token ids, the same from every endpoint."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from weft.backends.contract import Engine, check_takes_embeds, max_encoded_tokens
from weft.errors import InvalidRequest
from weft.options import LimitOptions
from weft.payloads import PromptEmbeds, check_total_bytes
from weft.types import MixedPrompt

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
