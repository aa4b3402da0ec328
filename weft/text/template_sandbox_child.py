"""The render process compiles one chat template, then renders conversations with it.

`template_sandbox` starts it as a script, with a socket as standard input and output: one JSON document a line each way.
It imports nothing of Weft, so that it starts fast and holds nothing worth stealing.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any, BinaryIO

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_MESSAGE_CHARS = 1000

# Python and jinja2 read some files at first use: codecs, the time zone, what formats an error. Rendering this makes
# them do so while files can still be opened.
_WARM_UP = "{{ 'a' | tojson }}{{ strftime_now('%c') }}{{ raise_exception('') }}"


class Raised(jinja2.TemplateError):
    """The template itself called raise_exception."""


class OutputTooLong(Exception):
    pass


class GenerationBlocks(Extension):
    """The tag {% generation %}, which marks the assistant's text for training, renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> None:
    raise Raised(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without jinja2's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Sandbox(ImmutableSandboxedEnvironment):
    # jinja2 computes no intercepted operator while compiling, so `9 ** 9999999` falls to the render's clock.
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def unsafe_undefined(self, obj: object, attribute: str) -> jinja2.Undefined:
        # jinja2's own answer prints as nothing, and fails only when it is used.
        raise SecurityError(f"reading {attribute!r} of a {type(obj).__name__}")


def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that published chat templates are written for."""
    env = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlocks])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def compile_template(source: str) -> tuple[jinja2.Template, list[str]]:
    """Return the template, and the names it reads that it does not set itself."""
    env = environment()
    declared = jinja2.meta.find_undeclared_variables(env.parse(source))
    return env.from_string(source), sorted(declared - env.globals.keys())


def render(template: jinja2.Template, variables: dict[str, Any], max_output_chars: int) -> str:
    pieces: list[str] = []
    left = max_output_chars
    for piece in template.generate(variables):
        left -= len(piece)
        if left < 0:
            raise OutputTooLong
        pieces.append(piece)
    return "".join(pieces)


def _failure(error: Exception) -> dict[str, str]:
    message = f"{type(error).__name__}: {error}"
    match error:
        case Raised():
            kind, message = "raised", str(error)
        case jinja2.TemplateSyntaxError():
            kind, message = "syntax", f"{error.message}, line {error.lineno}"
        case SecurityError():
            kind, message = "forbidden", str(error)
        case RecursionError():
            kind, message = "nesting", "nested too deeply"
        case MemoryError():
            kind, message = "memory", "out of memory"
        case OutputTooLong():
            kind, message = "length", "output too long"
        case _:
            kind = "failed"
    return {"error": kind, "message": message[:_MAX_MESSAGE_CHARS]}


def bound_resources(memory_bytes: int) -> None:
    """Let the process grow no further than this, open no file or connection, and leave no core dump."""
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def allow_seconds(of_work: float, by_the_clock: int) -> None:
    """Set the CPU time after which the kernel ends this process by SIGPROF: a busy machine is not the template's fault.
    The server kills a process that is late by the clock; if the server was killed meanwhile, the alarm does. 0 sets no
    limit."""
    signal.setitimer(signal.ITIMER_PROF, of_work)
    signal.alarm(by_the_clock)


def _answers(requests: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(Raised):
        render(compile_template(_WARM_UP)[0], {}, _MAX_MESSAGE_CHARS)
    yield {"started": True}
    first = next(requests, None)
    if first is None:
        return
    settings = json.loads(first)
    bound_resources(settings["memory_bytes"])
    allow_seconds(settings["compile_seconds"], settings["alarm_seconds"])
    try:
        template, declared = compile_template(settings["source"])
    except Exception as error:  # noqa: BLE001 (whatever a hostile template causes is reported, not raised here)
        yield _failure(error)
        return
    allow_seconds(0, 0)
    yield {"declared": declared}
    for line in requests:
        allow_seconds(settings["render_seconds"], settings["alarm_seconds"])
        try:
            answer = {"text": render(template, json.loads(line), settings["max_output_chars"])}
        except Exception as error:  # noqa: BLE001 (as above)
            answer = _failure(error)
        allow_seconds(0, 0)
        yield answer


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    for answer in _answers(iter(requests)):
        # A lone surrogate in a message must survive the way here and back, for the tokenizer to refuse it by name.
        replies.write(json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        replies.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
