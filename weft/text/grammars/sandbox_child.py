"""The grammar process learns a vocabulary, then answers for one grammar after the other whether it can be built.

`compiler` starts it as a script, with pipes as standard input and output: a length (4 bytes, little endian) and a
msgpack message each way. It imports nothing of Weft, so that it starts fast.
"""

from __future__ import annotations

import resource
import signal
import struct
import sys
from types import SimpleNamespace
from typing import Any, BinaryIO

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_CHARS = 1000


def problem_of(grammar: str, tokenizer: LLTokenizer) -> str:
    """Return why a grammar cannot be built, or cannot begin; empty when it can."""
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        return matcher.get_error()
    if not any(matcher.compute_bitmask()) or matcher.is_error():
        return "no text fits it"
    return ""


def _tokenizer(*, tokens: list[bytes], special_ids: list[int], eos_token_ids: list[int]) -> LLTokenizer:
    """Build a tokenizer that can only read tokens: grammars do not ask it to make any."""
    vocabulary = SimpleNamespace(
        tokens=tokens, special_token_ids=special_ids, eos_token_id=eos_token_ids[0], bos_token_id=None
    )
    return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=eos_token_ids)


def _read(requests: BinaryIO) -> Any:
    head = requests.read(_LENGTH.size)
    return msgspec.msgpack.decode(requests.read(_LENGTH.unpack(head)[0])) if head else None


def _write(replies: BinaryIO, answer: str) -> None:
    body = msgspec.msgpack.encode(answer[:_MAX_MESSAGE_CHARS])
    replies.write(_LENGTH.pack(len(body)) + body)
    replies.flush()


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    settings = _read(requests)
    if settings is None:
        return
    tokenizer = _tokenizer(**settings["vocabulary"])
    resource.setrlimit(resource.RLIMIT_AS, (settings["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _write(replies, "")
    while (grammar := _read(requests)) is not None:
        # The server kills a process that is late; if the server itself was killed meanwhile, the alarm does.
        signal.alarm(settings["alarm_seconds"])
        problem = problem_of(grammar, tokenizer)
        signal.alarm(0)
        _write(replies, problem)


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
