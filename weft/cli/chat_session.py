"""A chat in the terminal: it reads messages and commands, shows the answers, and keeps the conversation."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from rich.console import Console
from rich.table import Table

from weft.cli.chat_client import ChatModel
from weft.cli.command_flags import SAMPLING, check_sampling
from weft.errors import ContextTooLong, InvalidRequest, WeftError
from weft.terminal import AnswerView, MarkdownView, PlainView, printable, save_file
from weft.types import Usage

MAX_MESSAGE_CHARS = 2_000_000
MAX_SAVED_BYTES = 32 << 20
MAX_HISTORY_BYTES = 1 << 20
"""A longer history loses its older half when a chat begins."""


class ChatTurn(Struct, frozen=True):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class SavedChat(Struct, frozen=True, kw_only=True):
    """A conversation in a file, as /save writes it."""

    model: str = ""
    messages: list[ChatTurn]


class AnswerTimes(Struct, frozen=True, kw_only=True):
    """The times say how long an answer took."""

    usage: Usage = Usage()
    first_token_seconds: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """The rate of the tokens behind the first."""
        decoding = self.seconds - self.first_token_seconds
        return (self.usage.completion_tokens - 1) / decoding if decoding > 0 else 0.0

    def __str__(self) -> str:
        tokens = self.usage.completion_tokens
        parts = [f"{tokens} token{'' if tokens == 1 else 's'}"]
        if tokens > 1 and self.tokens_per_second:
            rate = self.tokens_per_second
            parts.append(f"{rate:.0f} tok/s" if rate >= 10 else f"{rate:.1f} tok/s")
        return ", ".join([*parts, f"TTFT {self.first_token_seconds * 1000:.0f} ms"])


class Leave(Exception):
    """Ends the chat."""


class ChatCommand(Struct, frozen=True):
    name: str
    form: str
    """The arguments that follow the name, as /help shows them."""
    about: str
    run: Callable[[Any, str], None]


_OTHER_NAMES = {"?": "help", "quit": "exit", "bye": "exit"}
_COMMAND = re.compile(r"/([a-z?]+)(?:\s+(.*))?", re.DOTALL)


class ChatSession:
    """A conversation with a model. `read` returns the next message; it raises EOFError at the end of the input and
    KeyboardInterrupt for Ctrl-C on an empty line."""

    def __init__(
        self,
        model: ChatModel,
        console: Console,
        read: Callable[[], str],
        *,
        system: str = "",
        sampling: Mapping[str, Any] = {},
    ) -> None:
        self._model = model
        self._console = console
        self._read = read
        self._system = system
        self._sampling = dict(sampling)
        self._messages: list[ChatTurn] = []
        self._shows = {"markdown": True, "stats": True}
        self._answers: list[AnswerTimes] = []
        self._is_interrupted = False
        """True after a Ctrl-C that nothing else followed: another one leaves."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as the model gets it."""
        turns = [ChatTurn("system", self._system), *self._messages] if self._system else self._messages
        return [{"role": turn.role, "content": turn.content} for turn in turns]

    def run(self) -> None:
        """Read and answer until the end of the input, /exit, or Ctrl-C twice."""
        while True:
            try:
                line = self._read().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                if self._is_interrupted:
                    return
                self._is_interrupted = True
                self._say("Ctrl-C again, Ctrl-D or /exit leaves.")
                continue
            self._is_interrupted = False
            try:
                self._take(line)
            except Leave:
                return
            except WeftError as error:
                self._say(str(error), style="red")

    def _take(self, line: str) -> None:
        if len(line) > MAX_MESSAGE_CHARS:
            raise InvalidRequest(
                f"The message has {len(line):,} characters, and at most {MAX_MESSAGE_CHARS:,} are sent."
            )
        if (found := _COMMAND.fullmatch(line)) is not None:
            name = _OTHER_NAMES.get(found[1], found[1])
            command = next((command for command in self.COMMANDS if command.name == name), None)
            if command is None:
                raise InvalidRequest(f"There is no command /{name}.", hint="/help lists them.")
            command.run(self, (found[2] or "").strip())
        elif line:
            self._answer(line)

    def _answer(self, line: str) -> None:
        """Add a message and its answer to the conversation; a message that is not answered is taken back."""
        self._messages.append(ChatTurn("user", line))
        view, text, usage, is_cut, stopped, num_deltas = self._view(), "", Usage(), False, False, 0
        began, first = time.perf_counter(), None
        try:
            with closing(self._model.stream(self.messages, self._sampling)) as deltas:
                for delta in deltas:
                    if first is None and (delta.text or delta.reasoning):
                        first = time.perf_counter() - began
                    text, usage, is_cut, num_deltas = text + delta.text, delta.usage, delta.is_cut, num_deltas + 1
                    view.add(delta.text, delta.reasoning)
        except KeyboardInterrupt:
            stopped = self._is_interrupted = True
            # A server tells the tokens at the end of an answer alone.
            usage = replace(usage, completion_tokens=max(usage.completion_tokens, num_deltas))
        except ContextTooLong as error:
            raise ContextTooLong(error.message, hint="/clear forgets the conversation.") from error
        finally:
            view.end()
            if text.strip():
                self._messages.append(ChatTurn("assistant", text))
            else:
                self._messages.pop()
        if first is not None:
            self._answers.append(
                AnswerTimes(usage=usage, first_token_seconds=first, seconds=time.perf_counter() - began)
            )
        if stopped:
            self._say("Stopped. Ctrl-C again leaves.")
        elif first is not None and self._shows["stats"]:
            cut = "; ended by the token limit (/set max_tokens)" if is_cut else ""
            self._say(f"{self._answers[-1]}{cut}")

    def _view(self) -> AnswerView:
        if not (self._console.is_terminal and sys.stdout.isatty()) or self._console.is_dumb_terminal:
            return PlainView()
        return MarkdownView(self._console, is_plain=not self._shows["markdown"])

    def _say(self, text: str, style: str = "dim") -> None:
        self._console.print(printable(text), style=style, highlight=False, markup=False)

    # The commands, each with the text that follows its name.

    def _run_help(self, argument: str) -> None:
        table = Table(box=None, show_header=False, pad_edge=False)
        for command in self.COMMANDS:
            table.add_row(f"/{command.name} {command.form}".strip(), command.about)
        self._console.print(table, markup=False, highlight=False)
        self._say(
            "Enter sends. Alt-Enter, or \\ before Enter, is a new line; pasted lines are one message. "
            "Ctrl-C stops an answer, and a second one leaves."
        )

    def _run_system(self, argument: str) -> None:
        if argument:
            self._system = "" if argument == "none" else argument
        self._say(f"The system message: {self._system}" if self._system else "There is no system message.")

    def _run_set(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        if not name:
            self._show_settings()
        elif name in self._shows:
            if value not in ("on", "off"):
                raise InvalidRequest(f"{name} is on or off.", hint=f"As in /set {name} off.")
            self._shows[name] = value == "on"
            self._say(f"{name}: {value}")
        elif name not in SAMPLING:
            raise InvalidRequest(
                f"There is no setting {name!r}.", hint=f"Possible: {', '.join([*SAMPLING, *self._shows])}."
            )
        elif value == "default":
            self._sampling.pop(name, None)
            self._say(f"{name}: {self._shown(name)}")
        else:
            changed = {**self._sampling, name: _value(name, value)}
            check_sampling(changed)
            self._sampling = changed
            self._say(f"{name}: {self._shown(name)}")

    def _shown(self, name: str) -> str:
        unset = "not set" if name in ("max_tokens", "seed", "stop") else "the model's own"
        return printable(str(self._sampling.get(name, unset)))

    def _show_settings(self) -> None:
        table = Table(box=None, show_header=False, pad_edge=False)
        for name in SAMPLING:
            table.add_row(name, self._shown(name))
        for name, is_on in self._shows.items():
            table.add_row(name, "on" if is_on else "off")
        self._console.print(table, highlight=False, markup=False)

    def _run_stats(self, argument: str) -> None:
        if not self._answers:
            self._say("There is no answer yet.")
            return
        last, usages = self._answers[-1], [answer.usage for answer in self._answers]
        self._say(f"last answer: {last}, {last.seconds:.1f} s in all")
        self._say(f"its prompt: {last.usage.prompt_tokens} tokens, {last.usage.cached_tokens} of them cached")
        self._say(
            f"all {len(usages)}: {sum(usage.prompt_tokens for usage in usages)} prompt tokens, "
            f"{sum(usage.completion_tokens for usage in usages)} tokens answered"
        )

    def _run_save(self, argument: str) -> None:
        path = _path(argument, "save")
        if path.exists():
            raise InvalidRequest(f"{path} exists.", hint="Give another name.")
        turns = [ChatTurn(**message) for message in self.messages]  # type: ignore[arg-type]
        content = msgspec.json.encode(SavedChat(model=self._model.name, messages=turns))
        save_file(path, msgspec.json.format(content, indent=2) + b"\n")
        self._say(f"{path}: {len(turns)} messages")

    def _run_load(self, argument: str) -> None:
        path = _path(argument, "load")
        try:
            with path.open("rb") as file:
                content = file.read(MAX_SAVED_BYTES + 1)
            if len(content) > MAX_SAVED_BYTES:
                raise InvalidRequest(f"{path} is larger than {MAX_SAVED_BYTES >> 20} MiB.")
            saved = msgspec.json.decode(content, type=SavedChat)
        except OSError as error:
            raise InvalidRequest(f"{path}: {error.strerror}.") from error
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"{path} is not a saved conversation: {error}.") from error
        self._system = next((turn.content for turn in saved.messages if turn.role == "system"), "")
        self._messages = [turn for turn in saved.messages if turn.role != "system"]
        self._say(f"{path}: {len(saved.messages)} messages")

    def _run_image(self, argument: str) -> None:
        if not argument:
            raise InvalidRequest("/image needs a text.", hint="As in /image a red circle on a blue background.")
        number = 1
        while (path := Path(f"image-{number}.png")).exists():
            number += 1
        try:
            self._model.image(argument, path, self._console)
        except KeyboardInterrupt:
            self._is_interrupted = True
            self._say("Stopped. Ctrl-C again leaves.")

    def _run_model(self, argument: str) -> None:
        if not argument:
            others = [name for name in self._model.models() if name != self._model.name]
            self._say("; others: ".join([self._model.name, *([", ".join(others)] if others else [])]))
        elif argument != self._model.name:
            self._model.choose(argument)
            self._say(f"Now with {self._model.name}.")

    def _run_clear(self, argument: str) -> None:
        self._messages = []
        self._say("The conversation is forgotten.")

    def _run_exit(self, argument: str) -> None:
        raise Leave

    COMMANDS = (
        ChatCommand("help", "", "list the commands", _run_help),
        ChatCommand("system", "[TEXT]", "set the system message, show it, or remove it (/system none)", _run_system),
        ChatCommand(
            "set",
            "[NAME VALUE]",
            "change a sampling parameter, markdown or stats (default resets), or show all",
            _run_set,
        ),
        ChatCommand("stats", "", "show the figures of the last answer and of all", _run_stats),
        ChatCommand("save", "FILE", "write the conversation to a JSON file", _run_save),
        ChatCommand("load", "FILE", "go on with a conversation from such a file", _run_load),
        ChatCommand("image", "TEXT", "generate an image, and write it to image-1.png or the next number", _run_image),
        ChatCommand("model", "[NAME]", "use another model, or list them; the conversation stays", _run_model),
        ChatCommand("clear", "", "forget the conversation; the system message stays", _run_clear),
        ChatCommand("exit", "", "leave", _run_exit),
    )


def _value(name: str, text: str) -> Any:
    kind, _ = SAMPLING[name]
    if name == "stop":
        return (text.replace("\\n", "\n"),)
    try:
        return kind(text)
    except ValueError as error:
        wanted = "a whole number" if kind is int else "a number"
        raise InvalidRequest(f"{name} must be {wanted}, not {text!r:.80}.", hint=f"As in /set {name} 1.") from error


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise InvalidRequest(f"/{command} needs a file.", hint=f"As in /{command} chat.json.")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:
        raise InvalidRequest(f"{argument!r:.200} is not a file.") from error


# The line editor.


class _Commands(Completer):
    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        text, names = document.text, [f"/{command.name}" for command in ChatSession.COMMANDS]
        if text.startswith("/") and " " not in text and "\n" not in text:
            yield from (Completion(name, -len(text)) for name in names if name.startswith(text))


def line_editor(history_file: Path | None) -> Callable[[], str]:
    """Return a reader of messages from a terminal: with history, several lines, and a paste as one message."""
    keys = KeyBindings()

    # What is typed while an answer comes arrives with Ctrl-J in the place of Enter.
    @keys.add("enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\") and not buffer.document.text_after_cursor:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=True,
        prompt_continuation="  ",
        key_bindings=keys,
        history=_history(history_file),
        completer=_Commands(),
        complete_while_typing=False,
        # Where the answers are redirected, the line is still edited in the terminal.
        output=create_output(always_prefer_tty=True),
    )
    return session.prompt


def _history(file: Path | None) -> History:
    """Return the messages of earlier chats; none where their file cannot be read and written."""
    if file is None:
        return InMemoryHistory()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        if file.stat().st_size > MAX_HISTORY_BYTES:
            kept = file.read_bytes()[-MAX_HISTORY_BYTES // 2 :]
            file.write_bytes(kept[max(0, kept.find(b"\n# ")) :])
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))
