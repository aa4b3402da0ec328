"""The answer of a chat is read here: its reasoning, its content and its tool calls, each in its place."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct

from weft.backends.contract import ParsedOutput
from weft.text.grammars.specs import ThinkingSpec
from weft.text.parsers.calls import CustomInput
from weft.text.parsers.pieces import (
    CallArguments,
    CallStarted,
    Content,
    CustomCallInput,
    CustomCallStarted,
    Parser,
    Piece,
    PlainParser,
    Reasoning,
    collect,
)
from weft.text.parsers.reasoning import ReasoningStyle
from weft.text.parsers.styles import ToolStyle, parser_for
from weft.types import FinishReason, Output, Timings, TokenLogprob, Usage


class ReaderOptions(Struct, frozen=True, kw_only=True):
    tools: ToolStyle | None = None
    """None: the request has no tools, or may not call them."""
    declared: tuple[str, ...] = ()
    """The names of the request's tools."""
    custom: frozenset[str] = frozenset()
    """Those of them that are custom tools."""
    most_calls: int | None = None
    reasoning: ReasoningStyle | None = None
    reasoning_opened: bool = False
    """True when the prompt's own end has opened the reasoning."""
    with_reasoning: bool = True
    is_read: bool = False
    """The engine tells thoughts and calls apart itself."""
    is_forced_call: bool = False
    """A grammar leaves the answer no text but that of calls: what is not read as one, because it was cut, is none."""
    is_named_call: bool = False
    """The answer is a call of the tool that the request named: OpenAI does not call that a reason to stop."""

    @property
    def is_plain(self) -> bool:
        """True when all text is content."""
        return self.tools is None and self.reasoning is None and not self.is_read

    @property
    def markers(self) -> tuple[str, ...]:
        tools = self.tools.markers if self.tools is not None else ()
        return tools + ((self.reasoning.begin, self.reasoning.end) if self.reasoning is not None else ())

    @property
    def call_marker(self) -> str:
        """Return the text with which a call begins, where the model marks its calls."""
        return self.tools.markers[0] if self.tools is not None else ""

    @property
    def thinking(self) -> ThinkingSpec | None:
        """Return what may stand before an output that is in form."""
        if self.reasoning is None:
            return None
        return ThinkingSpec(begin=self.reasoning.begin, end=self.reasoning.end, is_open=self.reasoning_opened)

    def reader(self) -> OutputReader:
        """Return a reader for one answer."""
        return OutputReader(self)

    def parser(self) -> Parser:
        if self.tools is None and self.reasoning is None:
            return PlainParser()
        return parser_for(self.tools, self.reasoning, declared=self.declared, reasoning_opened=self.reasoning_opened)


class OutputReader:
    """Parses one answer's outputs into pieces, without those that the request does not want to see."""

    def __init__(self, options: ReaderOptions) -> None:
        self._options = options
        self._parser = options.parser()
        self._input: CustomInput | None = None
        """It reads the input of the call of a custom tool that is open."""

    def read(self, output: Output) -> list[Piece]:
        """Return the pieces of an output. With the last one, all that was held back comes too."""
        if isinstance(output, ParsedOutput):
            return self._kept(output.pieces)
        pieces = self._parser.push(output.text)
        if output.finish:
            is_cut = output.finish is FinishReason.LENGTH or output.stop_reason is not None
            pieces = [*pieces, *self._parser.finish(is_cut=is_cut)]
        return self._kept(pieces)

    def _kept(self, pieces: Iterable[Piece]) -> list[Piece]:
        kept = [piece for piece in pieces if self._keeps(piece)]
        return [*self._with_inputs(kept)] if self._options.custom else kept

    def _with_inputs(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        """Yield the pieces, those of custom tools' calls with the input in the place of the arguments."""
        for piece in pieces:
            match piece:
                case CallStarted(index, call_id, name):
                    is_custom = name in self._options.custom
                    self._input = CustomInput() if is_custom else None
                    yield CustomCallStarted(index, call_id, name) if is_custom else piece
                case CallArguments(index, text) if self._input is not None:
                    if said := collect(self._input.push(text)).content:
                        yield CustomCallInput(index, said)
                case _:
                    yield piece

    def _keeps(self, piece: Piece) -> bool:
        match piece:
            case Content():
                return not self._options.is_forced_call
            case Reasoning():
                return self._options.with_reasoning
            case CallStarted(index=index) | CallArguments(index=index):
                return self._options.most_calls is None or index < self._options.most_calls


class CollectedOutput:
    """Gathers all outputs of one request for an answer in one piece."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._pieces: list[Piece] | None = None
        """The pieces of an answer that its engine has parsed itself."""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] | None = None
        self.finish = FinishReason.ERROR
        self.stop_reason: str | int | None = None
        self.usage = Usage()
        self.timings: Timings | None = None
        self.embedding: bytes | None = None
        self.image: bytes | None = None

    def add(self, output: Output) -> None:
        self._texts.append(output.text)
        if isinstance(output, ParsedOutput):
            self._pieces = [*(self._pieces or ()), *output.pieces]
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish:
            self.finish = output.finish
            self.stop_reason = output.stop_reason
            self.usage = output.usage
            self.timings = output.timings
            self.embedding = output.embedding
            self.image = output.image

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def whole(self) -> Output:
        """Return all text of it, as one output."""
        if self._pieces is not None:
            return ParsedOutput(text=self.text, pieces=self._pieces, finish=self.finish)
        return Output(
            text=self.text,
            token_ids=self.token_ids,
            logprobs=self.logprobs or None,
            finish=self.finish,
            stop_reason=self.stop_reason,
        )


class BlockKind(enum.StrEnum):
    TEXT = "text"
    THINKING = "thinking"
    CALL = "call"


AnswerToken = tuple[int, TokenLogprob]
"""A token's id, and its figures."""


class TokenTexts:
    """Finds the tokens that a text of the answer was written with, where they have figures."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._waiting: list[tuple[bytes, AnswerToken | None]] = []
        """The tokens whose text has not been seen; without figures: the rest of one that was given."""

    def add(self, output: Output) -> None:
        if output.logprobs:
            for token_id, figures in zip(output.token_ids, output.logprobs, strict=True):
                self._waiting.append((self._token_bytes(token_id), (token_id, figures)))

    def take(self, text: str) -> list[AnswerToken]:
        """Return the tokens of the next such text; none for one that was not written so."""
        wanted = text.encode()
        begin = b"".join(data for data, _ in self._waiting).find(wanted) if self._waiting else -1
        if begin < 0:
            return []
        end, at, taken = begin + len(wanted), 0, list[AnswerToken]()
        for number, (data, token) in enumerate(self._waiting):
            behind = at + len(data)
            if behind > begin and token is not None:
                taken.append(token)
            if behind >= end:
                rest = [(data[end - at :], None)] if behind > end else []
                self._waiting = [*rest, *self._waiting[number + 1 :]]
                break
            at = behind
        return taken


class OutputBlock:
    """A block of an answer, as far as it has come. The text of a call is its arguments, or a custom tool's input."""

    def __init__(self, index: int, kind: BlockKind, call: CallStarted | None = None) -> None:
        self.index = index
        self.kind = kind
        self.call_id = "" if call is None else call.id
        self.name = "" if call is None else call.name
        self.is_custom = isinstance(call, CustomCallStarted)
        self.tokens: list[AnswerToken] = []
        """The tokens of its text, where their figures are asked for."""
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, text: str, tokens: Sequence[AnswerToken] = ()) -> None:
        self._texts.append(text)
        self.tokens += tokens


class Opened(Struct, frozen=True):
    block: OutputBlock


class Grown(Struct, frozen=True):
    block: OutputBlock
    text: str
    """The text that is new."""
    tokens: Sequence[AnswerToken] = ()
    """Its tokens, where their figures are asked for."""


class Closed(Struct, frozen=True):
    block: OutputBlock


Change = Opened | Grown | Closed


class OutputBlocks:
    """Puts a reader's pieces together: neighbours of one kind are one block, and a call ends where another begins."""

    def __init__(self, reader: OutputReader, tokens: TokenTexts | None = None) -> None:
        """`tokens`: the figures of the tokens are asked for."""
        self._reader = reader
        self._tokens = tokens
        self._open: OutputBlock | None = None
        self.all: list[OutputBlock] = []

    def push(self, output: Output) -> list[Change]:
        """Return what the next output of the answer changes; with its end the last block is closed."""
        if self._tokens is not None:
            self._tokens.add(output)
        changes = [change for piece in self._reader.read(output) for change in self._changes(piece)]
        return changes + self._close() if output.finish else changes

    def _changes(self, piece: Piece) -> list[Change]:
        match piece:
            case CallStarted():
                return self._begin(BlockKind.CALL, piece)
            case CallArguments(_, text):
                return self._grow(BlockKind.CALL, text)
            case Content(text):
                return self._grow(BlockKind.TEXT, text)
            case Reasoning(text):
                return self._grow(BlockKind.THINKING, text)

    def _grow(self, kind: BlockKind, text: str) -> list[Change]:
        changes = [] if self._open is not None and self._open.kind is kind else self._begin(kind)
        block = self.all[-1]
        tokens = self._tokens.take(text) if self._tokens is not None else ()
        block.add(text, tokens)
        return [*changes, Grown(block, text, tokens)]

    def _begin(self, kind: BlockKind, call: CallStarted | None = None) -> list[Change]:
        changes = self._close()
        self._open = OutputBlock(len(self.all), kind, call)
        self.all.append(self._open)
        return [*changes, Opened(self._open)]

    def _close(self) -> list[Change]:
        closed, self._open = self._open, None
        return [] if closed is None else [Closed(closed)]
