"""An answer in Anthropic's shape, whole or as its stream of events."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import msgspec

from weft.backends.contract import num_tokens
from weft.errors import WeftError
from weft.frontend.answers import Output
from weft.frontend.blocks import Blocks, Change, Closed, Grown, Kind, Opened
from weft.frontend.errors import error_body
from weft.frontend.messages.answers import MessageAnswer, answer_block, message_usage
from weft.frontend.messages.errors import anthropic_error
from weft.frontend.sse import named_event
from weft.frontend.translate import ChatJob
from weft.types import Delta, FinishReason, Usage

_PING = named_event("ping", {"type": "ping"})
_STOP = named_event("message_stop", {"type": "message_stop"})


class MessagesWriter:
    def __init__(self, chat: ChatJob) -> None:
        self.answer_id = f"msg_{uuid.uuid4().hex}"
        self._model_name = chat.job.model_name
        self._blocks = Blocks(chat.reading.reader())
        self._usage = Usage(prompt_tokens=num_tokens(chat.job.prompts[0]))

    def opening(self) -> bytes:
        message = self._message(None, None, self._usage)
        return named_event("message_start", {"type": "message_start", "message": message})

    def chunks(self, index: int, delta: Delta) -> bytes:
        if delta.usage.prompt_tokens:
            self._usage = delta.usage
        changes = self._blocks.push(delta)
        events = [_event(change) for change in changes]
        if delta.finish:
            events.append(self._last_event(delta.finish, delta.stop_reason))
        return b"".join(events)

    def closing(self, usages: Sequence[Usage]) -> bytes:
        return _STOP

    def failure(self, error: WeftError) -> bytes:
        return named_event("error", anthropic_error(error.status, error_body(error).error.message))

    def whole(self, outputs: Sequence[Output]) -> bytes:
        [output] = outputs
        self._blocks.push(output.whole)
        stop_reason, stop_sequence = self._stop(output.finish, output.stop_reason)
        message = self._message(stop_reason, stop_sequence, output.usage)
        message.content.extend(answer_block(block, block.text) for block in self._blocks.all)
        return msgspec.json.encode(message)

    def _message(self, stop_reason: str | None, stop_sequence: str | None, usage: Usage) -> MessageAnswer:
        return MessageAnswer(
            id=self.answer_id,
            model=self._model_name,
            content=[],
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=message_usage(usage),
        )

    def _last_event(self, finish: FinishReason, matched: str | int | None) -> bytes:
        stop_reason, stop_sequence = self._stop(finish, matched)
        return named_event(
            "message_delta",
            {
                "type": "message_delta",
                "delta": {"stop_reason": stop_reason, "stop_sequence": stop_sequence},
                "usage": message_usage(self._usage),
            },
        )

    def _stop(self, finish: FinishReason, matched: str | int | None) -> tuple[str, str | None]:
        """Why it ended, and the stop sequence that ended it."""
        if finish is FinishReason.LENGTH:
            return "max_tokens", None
        if isinstance(matched, str):
            return "stop_sequence", matched
        called = any(block.kind is Kind.CALL for block in self._blocks.all)
        return "tool_use" if called else "end_turn", None


def _event(change: Change) -> bytes:
    index = change.block.index
    match change:
        case Opened(block):
            name = "content_block_start"
            start = named_event(name, {"type": name, "index": index, "content_block": answer_block(block, "")})
            return start + _PING if index == 0 else start
        case Grown(block, text):
            name = "content_block_delta"
            return named_event(name, {"type": name, "index": index, "delta": _delta(block.kind, text)})
        case Closed():
            name = "content_block_stop"
            return named_event(name, {"type": name, "index": index})


def _delta(kind: Kind, text: str) -> dict[str, str]:
    match kind:
        case Kind.TEXT:
            return {"type": "text_delta", "text": text}
        case Kind.THINKING:
            return {"type": "thinking_delta", "thinking": text}
        case Kind.CALL:
            return {"type": "input_json_delta", "partial_json": text}
