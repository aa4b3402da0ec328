"""The model that a chat in the terminal talks to: one that is loaded for it, or one of a server that runs already."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from weft.backends.openai_server.chunks import PeerChatChoice, PeerUsage
from weft.errors import ConfigError, InvalidRequest, ModelNotFound, Unavailable, WeftError
from weft.hub.short_names import SHORT_NAMES
from weft.types import Usage

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

    from weft.backends.blocking import BlockingEngine
    from weft.options import Config

T = TypeVar("T", bound=Struct)

Messages = Sequence[Mapping[str, Any]]

PROBE_SECONDS = 1.0
CONNECT_SECONDS = 10.0
MAX_ERROR_BYTES = 1 << 16
MAX_LIST_BYTES = 1 << 20
OWNER = "weft"
"""The owner of every model in the list of a Weft server: what is told from other servers by."""


class AnswerDelta(Struct, frozen=True, kw_only=True):
    """The next piece of an answer."""

    text: str = ""
    reasoning: str = ""
    usage: Usage = Usage()
    is_cut: bool = False
    """True with the last piece, where the answer ended because it may be no longer."""


class ChatModel(Protocol):
    """A model that answers a conversation."""

    @property
    def name(self) -> str: ...

    @property
    def place(self) -> str:
        """The address of its server; empty: it is loaded by this process."""

    def stream(self, messages: Messages, sampling: Mapping[str, Any]) -> Generator[AnswerDelta, None, None]:
        """Yield the answer as it comes; raises the error that it ends with. Closing the generator aborts it. Sampling
        parameters that are not given are the model's own."""

    def image(self, prompt: str, path: Path, console: Console) -> None:
        """Generate an image, and write it to a PNG file."""

    def models(self) -> list[str]:
        """Return the names that `choose` takes."""

    def choose(self, name: str) -> None:
        """Answer with another model from now on. Raises WeftError, and nothing has changed then."""

    def close(self) -> None: ...


class LocalModel:
    """A model that is loaded for this chat, and unloaded with it."""

    place = ""

    def __init__(self, config: Config, start: Callable[[Config], BlockingEngine]) -> None:
        self._config = config
        self._start = start
        self._local = start(config)

    @property
    def name(self) -> str:
        return self._local.engine.model.name

    def stream(self, messages: Messages, sampling: Mapping[str, Any]) -> Generator[AnswerDelta, None, None]:
        from weft.backends.contract import max_encoded_tokens
        from weft.serving.output_reader import ReaderOptions
        from weft.text.parsers.pieces import collect
        from weft.text.parsers.reasoning import opens_reasoning
        from weft.types import Conversation, FinishReason, Prompt

        engine = self._local.engine
        params = replace(engine.text.sampling_defaults.params(), **sampling)
        style, is_open = engine.text.styles.reasoning, False
        prompt: Prompt = Conversation(messages=messages)
        if engine.abilities.tokens:
            written = engine.text.encode_chat(messages, max_tokens=max_encoded_tokens(engine))
            prompt = written.token_ids
            is_open = style is not None and opens_reasoning(style, written.text[-100:])
        reader = ReaderOptions(reasoning=style, reasoning_opened=is_open).reader()
        with closing(self._local.stream(prompt, params)) as outputs:
            for output in outputs:
                read = collect(reader.read(output))
                yield AnswerDelta(
                    text=read.content,
                    reasoning=read.reasoning,
                    usage=output.usage,
                    is_cut=output.finish is FinishReason.LENGTH,
                )

    def image(self, prompt: str, path: Path, console: Console) -> None:
        from weft.serving.image_request import ImageOptions
        from weft.terminal import write_image

        self._local.wait(write_image(self._local.engine, ImageOptions(prompt=prompt), path, console))

    def models(self) -> list[str]:
        from weft.hub.snapshots import list_models

        return [model.name for model in list_models()]

    def choose(self, name: str) -> None:
        from weft.hub.resolve import find_model

        config = replace(self._config, model=replace(self._config.model, model=name, served_model_name="", revision=""))
        find_model(config)
        # Two models may not fit into the memory together.
        self._local.close()
        try:
            self._local = self._start(config)
        except BaseException:
            self._local = self._start(self._config)
            raise
        self._config = config

    def close(self) -> None:
        self._local.close()


class _Card(Struct, frozen=True):
    id: str
    owned_by: str = ""
    capabilities: tuple[str, ...] = ("chat",)


class _Cards(Struct, frozen=True):
    data: list[_Card]


class _Told(Struct, frozen=True):
    message: str = ""


class _Chunk(Struct, frozen=True):
    choices: list[PeerChatChoice] = []
    usage: PeerUsage | None = None
    error: _Told | None = None


class _Image(Struct, frozen=True):
    b64_json: str


class _Images(Struct, frozen=True):
    data: list[_Image]


class _Failure(Struct, frozen=True):
    error: _Told


class ServerModel:
    """A model of a server with OpenAI's interface."""

    def __init__(self, url: str, key: str = "", name: str = "") -> None:
        """Ask the server for its models. Raises Unavailable where it does not answer, ConfigError for an address that
        is none, and ModelNotFound where it does not have the model."""
        import httpx

        self.place = base_url(url)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(CONNECT_SECONDS, read=None)
        # For plain HTTP no certificates are read.
        verify = self.place.startswith("https:")
        self._client = httpx.Client(base_url=self.place, headers=headers, timeout=timeout, verify=verify)
        try:
            names = self.models()
            if not names:
                raise Unavailable(f"The server at {self.place} has no model to chat with.")
            self.name = names[0]
            if name:
                self.choose(name)
        except BaseException:
            self.close()
            raise

    def stream(self, messages: Messages, sampling: Mapping[str, Any]) -> Generator[AnswerDelta, None, None]:
        body = {"model": self.name, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        usage, is_cut = Usage(), False
        with self._reaching(), self._client.stream("POST", "/v1/chat/completions", json={**body, **sampling}) as answer:
            self._check(answer)
            for line in answer.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                chunk = self._decoded(data.encode(), _Chunk)
                if chunk.error is not None:
                    raise Unavailable(chunk.error.message or "The server ended the answer without a reason.")
                if chunk.usage is not None:
                    usage = chunk.usage.usage()
                for choice in chunk.choices:
                    is_cut = is_cut or choice.finish_reason == "length"
                    text, reasoning = choice.delta.content or "", choice.delta.reasoning_content or ""
                    yield AnswerDelta(text=text, reasoning=reasoning, usage=usage, is_cut=is_cut)
        yield AnswerDelta(usage=usage, is_cut=is_cut)

    def image(self, prompt: str, path: Path, console: Console) -> None:
        from weft.terminal import save_file

        with self._reaching(), console.status("generating the image"):
            answer = self._client.post("/v1/images/generations", json={"prompt": prompt})
            self._check(answer)
        images = self._decoded(answer.content, _Images).data
        try:
            content = base64.b64decode(images[0].b64_json, validate=True)
        except (IndexError, binascii.Error) as error:
            raise Unavailable(f"The server at {self.place} sent no image.") from error
        save_file(path, content)
        console.print(f"{path}: {len(content):,} bytes", highlight=False, markup=False, soft_wrap=True)

    def models(self) -> list[str]:
        with self._reaching():
            answer = self._client.get("/v1/models", timeout=CONNECT_SECONDS)
            self._check(answer)
        return [card.id for card in self._decoded(answer.content, _Cards).data if "chat" in card.capabilities]

    def choose(self, name: str) -> None:
        names = self.models()
        if (found := served_as(name, names)) is None:
            raise ModelNotFound(f"The server at {self.place} has no model {name!r}; it has {', '.join(names)}.")
        self.name = found

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except httpx.HTTPError as error:
            raise Unavailable(
                f"The server at {self.place} cannot be reached: {str(error) or type(error).__name__}.",
                hint="--url names another one.",
            ) from error

    def _check(self, answer: httpx.Response) -> None:
        """Raise for an answer that is an error."""
        if answer.status_code == 200:
            return
        try:
            told = msgspec.json.decode(_first_bytes(answer, MAX_ERROR_BYTES), type=_Failure).error.message
        except msgspec.DecodeError:
            told = ""
        if answer.status_code in (401, 403):
            raise ConfigError(
                f"The server at {self.place} wants another API key: {told or answer.status_code}",
                hint="Give --api-key, or set WEFT_API_KEY.",
            )
        kind: type[WeftError] = InvalidRequest if answer.status_code < 500 else Unavailable
        raise kind(told or f"The server at {self.place} answers {answer.status_code}.")

    def _decoded(self, content: bytes, form: type[T]) -> T:
        try:
            return msgspec.json.decode(content, type=form)
        except msgspec.DecodeError as error:
            raise Unavailable(f"The answer of the server at {self.place} is not understood: {error}.") from error


def _first_bytes(answer: httpx.Response, most: int) -> bytes:
    content = b""
    for part in answer.iter_bytes():
        content += part
        if len(content) >= most:
            break
    return content[:most]


def base_url(url: str) -> str:
    """Return the address of a server without /v1 at its end. Raises ConfigError for a text that is none."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError("--url is not the URL of a server.", hint="Such as http://127.0.0.1:8000.")
    if parts.username is not None or parts.password is not None:
        raise ConfigError("--url has a name or a password in it.", hint="Give the key with --api-key.")
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/").removesuffix("/v1")


def served_as(name: str, names: Sequence[str]) -> str | None:
    """Return what a server calls the model; None: it does not have it."""
    short = SHORT_NAMES.get(name)
    return next((each for each in (name, short.name if short is not None else name) if each in names), None)


class Probe(Struct, frozen=True):
    """A probe tells what answers on the port where `weft serve` listens."""

    url: str
    models: tuple[str, ...] = ()
    """The models that a Weft server there can chat with; none: there is none."""
    wants_key: bool = False


def probe(port: int) -> Probe:
    """Look for a Weft server on this machine. No key is sent: it is not known yet who listens."""
    import httpx

    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.stream("GET", f"{url}/v1/models", timeout=PROBE_SECONDS, trust_env=False) as answer:
            if answer.status_code == 401:
                return Probe(url, wants_key=True)
            content = _first_bytes(answer, MAX_LIST_BYTES)
        cards = msgspec.json.decode(content, type=_Cards).data
    except (httpx.HTTPError, msgspec.DecodeError):
        return Probe(url)
    return Probe(url, tuple(card.id for card in cards if card.owned_by == OWNER and "chat" in card.capabilities))
