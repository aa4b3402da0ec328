"""The commands that talk with a model in the terminal: run and chat."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.command_flags import ENGINE_SECTIONS, EPILOG, LOCAL_FLAGS, configured, console
from weft.config import differences
from weft.errors import ConfigError
from weft.options import Config

if TYPE_CHECKING:
    from weft.backends.blocking import BlockingEngine
    from weft.cli.chat_client import ChatModel

app = typer.Typer()

Url = Annotated[
    str,
    typer.Option(
        help="Talk to the server at this address; else to one on port 8000 (WEFT_PORT), if there is one.",
        envvar="WEFT_URL",
    ),
]
ApiKey = Annotated[str, typer.Option(help="The key that the server at --url wants; else WEFT_API_KEY.", metavar="KEY")]
Attach = Annotated[
    bool, typer.Option("--attach/--no-attach", help="Use a server that runs on this machine already, or never.")
]
System = Annotated[str, typer.Option(help="The system message before the conversation.")]
KeepHistory = Annotated[bool, typer.Option("--history/--no-history", help="Keep the messages for the next chat.")]


@app.command(epilog=EPILOG)
@configured(*ENGINE_SECTIONS, shown=LOCAL_FLAGS, positional_model=True, with_sampling=True)
def run(
    config: Config,
    prompt: Annotated[
        str, typer.Argument(help="Answer this alone; what is piped in stands before it.", metavar="PROMPT")
    ] = "",
    system: System = "",
    url: Url = "",
    api_key: ApiKey = "",
    attach: Attach = True,
    history: KeepHistory = True,
    *,
    sampling: dict[str, Any],
    given: frozenset[str],
) -> None:
    """Fetch a model if need be, and talk with it; or answer one prompt.

    weft run llama3.2:1b

    weft run qwen3:0.6b "Why is the sky blue?"
    """
    _talk(config, prompt, sampling, given, system=system, url=url, key=api_key, attach=attach, history=history)


@app.command(epilog=EPILOG)
@configured(*ENGINE_SECTIONS, shown=LOCAL_FLAGS, positional_model=True, with_sampling=True)
def chat(
    config: Config,
    system: System = "",
    url: Url = "",
    api_key: ApiKey = "",
    attach: Attach = True,
    history: KeepHistory = True,
    *,
    sampling: dict[str, Any],
    given: frozenset[str],
) -> None:
    """Talk with a model: of a server that runs already, else loaded for this chat.

    /help lists the commands in it. What is piped in is one message, and its answer alone is written to standard output.
    """
    _talk(config, "", sampling, given, system=system, url=url, key=api_key, attach=attach, history=history)


def _talk(
    config: Config,
    prompt: str,
    sampling: Mapping[str, Any],
    given: frozenset[str],
    *,
    system: str,
    url: str,
    key: str,
    attach: bool,
    history: bool,
) -> None:
    from weft import logs
    from weft.checkpoint.model_files import home

    logs.set_up("warning")
    message = _message(prompt)
    model = _chat_model(config, given, url=url, key=key, attach=attach, quiet=bool(message))
    try:
        if message:
            from weft.terminal import PlainView

            view = PlainView()
            first = [{"role": "system", "content": system}] if system else []
            for delta in model.stream([*first, {"role": "user", "content": message}], sampling):
                view.add(delta.text)
            view.end()
            return
        from weft.cli.chat_session import ChatSession, line_editor

        shown = console(stderr=not sys.stdout.isatty())
        place = f" at {model.place}" if model.place else ""
        shown.print(f"{model.name}{place}. /help lists the commands.", style="dim", highlight=False, markup=False)
        read = line_editor(home() / "chat_history" if history else None)
        ChatSession(model, shown, read, system=system, sampling=sampling).run()
    finally:
        model.close()


def _message(prompt: str) -> str:
    """Return the one message that is to be answered, of a prompt and of what is piped in; empty: there is a terminal to
    talk in."""
    from weft.terminal import read_stdin, with_context

    message = with_context(prompt, read_stdin())
    if not message.strip() and not (sys.stdin is not None and sys.stdin.isatty()):
        raise ConfigError("There is no message on standard input.", hint='As in: echo "Hello" | weft chat')
    return message


def _chat_model(config: Config, given: frozenset[str], *, url: str, key: str, attach: bool, quiet: bool) -> ChatModel:
    """Return the model of --url, or of a server on this machine that has it, or one that is loaded now."""
    from weft.cli.chat_client import LocalModel, ServerModel, probe, served_as

    named = config.model.model if "model" in given else ""
    if url:
        return ServerModel(url, key or next(iter(config.server.api_key), ""), named)
    notes = console(stderr=True)

    def note(text: str) -> None:
        if not quiet:
            notes.print(text, style="dim", highlight=False, markup=False)

    if attach and not any(
        setting.section in ENGINE_SECTIONS and setting.name != "model" for setting, _ in differences(config)
    ):
        found = probe(config.server.port)
        name = served_as(named, found.models) if named else next(iter(found.models), None)
        if name is not None:
            note(f"Using the server at {found.url}; --no-attach loads the model here.")
            return ServerModel(found.url, name=name)
        if found.models:
            note(f"The server at {found.url} has {', '.join(found.models)}, and not {named}.")
        elif found.wants_key:
            note(f"The server at {found.url} wants a key: --url {found.url} with --api-key uses it.")
    note(f"Loading {config.model.model}.")
    from weft.backends.registry import expect_engine

    expect_engine(config)
    return LocalModel(config, _blocking)


def _blocking(config: Config) -> BlockingEngine:
    from weft.backends import start_engine
    from weft.backends.blocking import BlockingEngine

    return BlockingEngine(lambda: start_engine(config))
