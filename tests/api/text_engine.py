"""A scripted engine whose tokenizer nobody knows: it is given text, and answers with text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from tests.api.scripted_engine import ScriptedEngine, Step
from weft.backends.contract import Abilities, ParsedOutput, Stream, check_abilities, tokens_unknown
from weft.text.parsers.pieces import CallArguments, CallStarted, Content, Piece, Reasoning
from weft.types import FinishReason, GenerationRequest, Output, Prompt, Usage

ABILITIES = Abilities(
    tokens=False,
    answer_tokens=False,
    with_tokenizer=frozenset({"tokens", "answer_tokens", "logprobs", "prompt_logprobs"}),
    logprobs=False,
    prompt_logprobs=False,
    min_p=False,
    embeddings=False,
)
USAGE = Usage(prompt_tokens=11, completion_tokens=6, cached_tokens=4)
PIECES: list[Piece] = [
    Reasoning("Which"),
    Reasoning(" city?"),
    Content("Let me look."),
    CallStarted(0, "call_a", "weather"),
    CallArguments(0, '{"city":'),
    CallArguments(0, ' "Oslo"}'),
    CallStarted(1, "call_b", "time"),
    CallArguments(1, "{}"),
]


def read(*pieces: Piece, finish: FinishReason = FinishReason.STOP) -> list[Step]:
    """A script of one output for each piece, and the end."""

    def text(piece: Piece) -> str:
        return piece.text if isinstance(piece, Content) else ""

    return [
        *(ParsedOutput(text=text(piece), pieces=[piece]) for piece in pieces),
        ParsedOutput(finish=finish, usage=USAGE),
    ]


def plain(*texts: str) -> list[Step]:
    return [*(Output(text=text) for text in texts), Output(finish=FinishReason.STOP, usage=USAGE)]


class TextEngine(ScriptedEngine):
    name = "remote"
    abilities = ABILITIES

    def __init__(self, script: Sequence[Step] = ()) -> None:
        super().__init__(script or read(Content("Hello")))
        self.model = replace(self.model, max_model_len=0, logits_width=0)
        self.asked: list[Prompt] = []

    @property
    def tokenizer(self) -> Any:
        raise tokens_unknown(self, "This")

    @tokenizer.setter
    def tokenizer(self, known: Any) -> None:
        """The engine that it is made of has one."""

    def encode_chat(self, *args: Any, **options: Any) -> Any:
        raise tokens_unknown(self, "This")

    async def submit(self, request: GenerationRequest) -> Stream:
        check_abilities(self, request)
        self.asked.append(request.prompt)
        return await super().submit(request)
