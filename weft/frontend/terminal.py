"""The terminal as a door: one answer, or a conversation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console

from weft.errors import WeftError
from weft.frontend.local import LocalEngine
from weft.types import Delta, SamplingParams

HELP = "/clear forgets the conversation, /exit leaves, Ctrl-C stops an answer."

Messages = list[dict[str, str]]


def generate(local: LocalEngine, prompt: str, params: SamplingParams, *, raw: bool) -> None:
    """Write the answer to standard output as it comes, and nothing else."""
    if raw:
        tokens = local.engine.tokenizer.encode(prompt)
    else:
        tokens = local.engine.encode_chat([{"role": "user", "content": prompt}]).token_ids
    for _ in _written(local, tokens, params):
        pass
    sys.stdout.write("\n")


def converse(
    local: LocalEngine, params: SamplingParams, console: Console, *, system: str, read_line: Callable[[str], str]
) -> None:
    """Read a line, answer it, until the end of input or /exit."""
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


def _answer(local: LocalEngine, messages: Messages, line: str, params: SamplingParams, console: Console) -> None:
    """Add a question and its answer to the conversation; a question that cannot be answered is taken back."""
    messages.append({"role": "user", "content": line})
    began = time.perf_counter()
    text, num_tokens = "", 0
    try:
        for delta in _written(local, local.engine.encode_chat(messages).token_ids, params):
            text += delta.text
            num_tokens += len(delta.token_ids)
    except KeyboardInterrupt:
        text += " …"
    except WeftError as error:
        messages.pop()
        console.print(str(error), style="red", highlight=False, markup=False)
        return
    messages.append({"role": "assistant", "content": text})
    seconds = time.perf_counter() - began
    console.print(f"\n{num_tokens} tokens, {num_tokens / seconds:.0f} a second", style="dim", highlight=False)


def _written(local: LocalEngine, tokens: list[int], params: SamplingParams) -> Iterator[Delta]:
    """The answer's deltas, each written to standard output before it is given."""
    for delta in local.stream(tokens, params):
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        yield delta
