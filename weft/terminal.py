"""The terminal as an endpoint: an answer as it comes, plain or as markdown, and images with a bar."""

from __future__ import annotations

import os
import re
import stat
import sys
import time
from collections.abc import Generator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from weft.backends.contract import Engine, chat_prompt, text_prompt
from weft.errors import ConfigError, WeftError
from weft.serving.image_request import ImageOptions, generate_image, image_requests
from weft.types import GenerateImage, Output, Prompt, SamplingParams

MAX_STDIN_BYTES = 16 << 20
FRAMES_PER_SECOND = 12
MAX_LIVE_CHARS = 4000
"""A paragraph or a code block that is longer is shown as plain text until it ends: it is laid out for every frame."""


class LocalEngine(Protocol):
    @property
    def engine(self) -> Engine: ...

    def stream(self, prompt: Prompt, params: SamplingParams) -> Generator[Output, None, None]:
        """Yield the answer as it comes; raises the error that it ends with. Leaving the iterator early aborts."""


def generate(local: LocalEngine, prompt: str, sampling: Mapping[str, Any], *, raw: bool) -> None:
    """Write the answer to standard output as it comes, and nothing else. `sampling` are the parameters that were given;
    others are the model's own."""
    params = replace(local.engine.text.sampling_defaults.params(), **sampling)
    if raw:
        given = text_prompt(local.engine, prompt)
    else:
        given = chat_prompt(local.engine, [{"role": "user", "content": prompt}])
    view = PlainView()
    for output in local.stream(given, params):
        view.add(output.text)
    view.end()


def read_stdin() -> str:
    """Return what is piped or redirected to standard input; empty for a terminal or where there is none. Raises
    ConfigError for more than a prompt may be, or what is no text."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty() or _is_device(sys.stdin):
        return ""
    # Standard input of a test has no bytes below its text.
    source: Any = getattr(sys.stdin, "buffer", None)
    data = source.read(MAX_STDIN_BYTES + 1) if source is not None else sys.stdin.read(MAX_STDIN_BYTES + 1).encode()
    if len(data) > MAX_STDIN_BYTES:
        raise ConfigError(f"Standard input has more than {MAX_STDIN_BYTES >> 20} MiB.", hint="Give a part of it.")
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("Standard input is not UTF-8 text.") from error


def _is_device(stream: Any) -> bool:
    try:
        return stat.S_ISCHR(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def with_context(prompt: str, context: str) -> str:
    """Return a prompt with the text that it is about before it."""
    return "\n\n".join(part for part in (context.strip("\n"), prompt) if part)


def write_json(value: object) -> None:
    """Write a value as indented JSON to standard output, for scripts."""
    encoded = msgspec.json.encode(value, enc_hook=str)
    sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")


def save_file(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise WeftError(f"{path} cannot be written: {error.strerror}.") from error


# An answer as it comes.


class AnswerView(Protocol):
    def add(self, text: str, reasoning: str = "") -> None:
        """Show the next piece of the answer, or of the reasoning before it."""

    def end(self) -> None: ...


class PlainView:
    """Writes the answer to standard output as it is, and nothing of the reasoning."""

    def add(self, text: str, reasoning: str = "") -> None:
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def end(self) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Return the text without control characters: those of a model's answer must not steer the terminal."""
    return _CONTROL.sub("", text)


class MarkdownView:
    """Shows the answer as markdown, wrapped at words. A paragraph, list or code block is laid out again while it grows,
    below those that are complete and stay as they are."""

    def __init__(self, console: Console, *, is_plain: bool = False) -> None:
        """`is_plain`: the text itself, wrapped."""
        self._console = console
        self._is_plain = is_plain
        self._growing = ""
        self._is_reasoning = False
        self._has_printed = False
        self._shown_at = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")

    def add(self, text: str, reasoning: str = "") -> None:
        for piece, is_reasoning in ((reasoning, True), (text, False)):
            if piece:
                self._add(printable(piece), is_reasoning)

    def end(self) -> None:
        self._settle(self._growing)
        self._growing = ""
        self._live.update(Group(), refresh=self._live.is_started)
        self._live.stop()

    def _add(self, text: str, is_reasoning: bool) -> None:
        if not self._live.is_started:
            self._live.start()
        if is_reasoning != self._is_reasoning:
            self._settle(self._growing)
            self._growing, self._is_reasoning = "", is_reasoning
        is_new_line = "\n" in text or self._growing.endswith("\n")
        self._growing += text
        complete = ""
        if is_new_line:
            complete, self._growing = split_blocks(self._growing)
            self._settle(complete)
        now = time.monotonic()
        if complete or now - self._shown_at > 1 / FRAMES_PER_SECOND:
            self._shown_at = now
            self._live.update(_Tail(self._laid_out(self._growing)), refresh=True)

    def _settle(self, block: str) -> None:
        """Print a block for good."""
        if not block.strip():
            return
        self._live.update(Group(), refresh=self._live.is_started)
        if self._has_printed:
            self._console.print()
        self._has_printed = True
        self._console.print(self._laid_out(block, is_whole=True))

    def _laid_out(self, block: str, *, is_whole: bool = False) -> Markdown | Text:
        if self._is_reasoning:
            return Text(block.strip("\n"), style="dim italic")
        if self._is_plain or (len(block) > MAX_LIVE_CHARS and not is_whole):
            return Text(block.strip("\n"))
        return Markdown(_with_breaks(block), code_theme="ansi_dark", hyperlinks=False)


class _Tail:
    """The last lines of something, as many as the terminal shows."""

    def __init__(self, shown: Markdown | Text) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._shown, options, pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


_FENCE = re.compile(r" {0,3}(```+|~~~+)")


def split_blocks(text: str) -> tuple[str, str]:
    """Split markdown into the blocks that can change no more, and the one that still grows. A block ends at an empty
    line outside of a code fence, before a line that is not indented."""
    end = at = 0
    fence = ""
    lines = text.splitlines(keepends=True)
    for line, following in pairwise(lines):
        at += len(line)
        found = _FENCE.match(line)
        if found is not None and (not fence or (found[1].startswith(fence) and not line.strip(" \n`~"))):
            fence = "" if fence else found[1]
        if not fence and not line.strip() and following.strip() and not following.startswith((" ", "\t")):
            end = at
    return text[:end], text[end:]


def _with_breaks(text: str) -> str:
    """Return markdown in which every line break of the text is one of the page, as in chats everywhere."""
    lines, fence = [], ""
    for line in text.split("\n"):
        found = _FENCE.match(line)
        if found is not None:
            fence = "" if fence else found[1]
        lines.append(line if fence or found is not None or not line.strip() else f"{line}  ")
    return "\n".join(lines)


# Images.


def check_image_file(path: Path) -> None:
    """Raise ConfigError for a file that could not be written later."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"{path}: images are written as PNG files.", hint="Give -o a name like out.png.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"There is no folder {path.absolute().parent}.", hint="Make it, or give -o another name.")


async def write_image(engine: Engine, options: ImageOptions, path: Path, console: Console) -> None:
    """Generate an image with a bar that tells how far it is, write it, and say where it is."""
    [request] = image_requests(options, engine)
    assert isinstance(request.task, GenerateImage)
    params = request.task.params
    began = time.perf_counter()
    columns = (TextColumn("denoising"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=params.steps)

        def show(output: Output) -> None:
            if output.denoise_step is not None:
                progress.update(bar, completed=output.denoise_step)

        image = await generate_image(engine, request, show)
    try:
        image.save(path)
    except OSError as error:
        raise WeftError(f"{path} cannot be written: {error.strerror}.") from error
    seconds = time.perf_counter() - began
    sys.stdout.write(
        f"{path}: {image.width}x{image.height}, {params.steps} steps in {seconds:.1f} s, seed {params.seed}\n"
    )
