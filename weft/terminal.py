"""The terminal as an endpoint: one answer, a conversation, or an image."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from weft.backends.contract import Engine, chat_prompt, text_prompt
from weft.errors import ConfigError, WeftError
from weft.serving.image_request import ImageOptions, generate_image, image_requests
from weft.types import GenerateImage, Output, Prompt, SamplingParams


class LocalEngine(Protocol):
    @property
    def engine(self) -> Engine: ...

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[Output]:
        """Yield the answer as it comes; raises the error that it ends with. Leaving the iterator early aborts."""


HELP = "/clear forgets the conversation, /exit leaves, Ctrl-C stops an answer."

Messages = list[dict[str, str]]


def generate(local: LocalEngine, prompt: str, sampling: Mapping[str, Any], *, raw: bool) -> None:
    """Write the answer to standard output as it comes, and nothing else. `sampling` are the parameters that were given;
    others are the model's own."""
    params = _params(local.engine, sampling)
    if raw:
        given = text_prompt(local.engine, prompt)
    else:
        given = chat_prompt(local.engine, [{"role": "user", "content": prompt}])
    for _ in _written(local, given, params):
        pass
    sys.stdout.write("\n")


def converse(
    local: LocalEngine, sampling: Mapping[str, Any], console: Console, *, system: str, read_line: Callable[[str], str]
) -> None:
    """Read a line, answer it, until the end of input or /exit. `sampling` is as in `generate`."""
    params = _params(local.engine, sampling)
    first: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(first)
    console.print(f"{local.engine.model.name}. {HELP}", style="dim", highlight=False)
    while True:
        try:
            line = read_line("> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        match line:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/clear":
                messages = list(first)
            case _ if line.startswith("/"):
                console.print(HELP, style="dim", highlight=False)
            case _:
                _answer(local, messages, line, params, console)


def _params(engine: Engine, given: Mapping[str, Any]) -> SamplingParams:
    return replace(engine.text.sampling_defaults.params(), **given)


def check_image_file(path: Path) -> None:
    """Raise ConfigError for a file that could not be written later."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"The image is a PNG file, and {path} is not named so.", hint="Give -o a name like out.png.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"There is no folder {path.absolute().parent}.", hint="Make it first, or give -o another.")


async def write_image(engine: Engine, options: ImageOptions, path: Path, console: Console) -> None:
    """Generate an image with a bar that tells how far it is, write it, and say where it is."""
    [request] = image_requests(options, engine)
    assert isinstance(request.task, GenerateImage)
    params = request.task.params
    began = time.perf_counter()
    columns = (TextColumn("drawing"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeRemainingColumn())
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


def _answer(local: LocalEngine, messages: Messages, line: str, params: SamplingParams, console: Console) -> None:
    """Add a question and its answer to the conversation; a question that cannot be answered is taken back."""
    messages.append({"role": "user", "content": line})
    began = time.perf_counter()
    text, num_tokens = "", 0
    try:
        for output in _written(local, chat_prompt(local.engine, [*messages]), params):
            text += output.text
            num_tokens = output.usage.completion_tokens
    except KeyboardInterrupt:
        text += " …"
    except WeftError as error:
        messages.pop()
        console.print(str(error), style="red", highlight=False, markup=False)
        return
    messages.append({"role": "assistant", "content": text})
    seconds = time.perf_counter() - began
    console.print(f"\n{num_tokens} tokens, {num_tokens / seconds:.0f} a second", style="dim", highlight=False)


def _written(local: LocalEngine, prompt: Prompt, params: SamplingParams) -> Iterator[Output]:
    """Yield the answer's outputs, each written to standard output before."""
    for output in local.stream(prompt, params):
        sys.stdout.write(output.text)
        sys.stdout.flush()
        yield output
