"""The commands that look at a running server: `weft top` shows its live view as text, `weft ps` lists its models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from weft.errors import ConfigError, Unavailable, WeftError

if TYPE_CHECKING:
    import httpx

    from weft.serving.live import LiveModel, Snapshot

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 10.0
MAX_EVENT_BYTES = 4 << 20

Url = Annotated[str, typer.Option("--url", help="Where the server answers.", envvar="WEFT_URL")]
ApiKey = Annotated[
    str,
    typer.Option("--api-key", help="The server's key, where it wants one.", envvar="WEFT_API_KEY", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write it as JSON.")]


def add_live_commands(app: typer.Typer) -> None:
    app.command()(top)
    app.command()(ps)


def top(url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Watch a running server: its requests, step budget, KV cache, speeds and latencies.

    q or Ctrl-C ends it. Where the output is no terminal, or with --json, it is one snapshot.
    """
    from rich.console import Console

    from weft.cli.live_text import snapshot_text, watch

    console = Console()
    if as_json:
        typer.echo(msgspec.json.encode(_settled(url, api_key)).decode())
    elif not console.is_terminal:
        console.print(snapshot_text(_settled(url, api_key), console))
    else:
        with suppress(KeyboardInterrupt):
            watch(lambda: live_stream(url, api_key), console, sys.stdin)


def ps(url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List the models of a running server, and what they take of its memory."""
    from rich.console import Console

    from weft.cli.live_text import models_table

    with live_stream(url, api_key) as snapshots:
        models = next(snapshots).models
    if as_json:
        typer.echo(msgspec.json.encode([_listed(model) for model in models]).decode())
    else:
        console = Console()
        console.print(models_table(models, console.width))


def _listed(model: LiveModel) -> dict[str, object]:
    names = ("name", "state", "stage", "engine", "device", "memory_bytes", "running", "waiting", "restarts")
    return {name: getattr(model, name) for name in names}


@contextmanager
def live_stream(url: str, api_key: str) -> Iterator[Iterator[Snapshot]]:
    """Open the live view of a server. Raises Unavailable when there is none."""
    import httpx

    headers = {"authorization": f"Bearer {api_key.split(',')[0]}"} if api_key else {}
    try:
        with httpx.stream("GET", f"{url.rstrip('/')}/live", headers=headers, timeout=TIMEOUT_S) as response:
            if response.status_code != 200:
                raise _refusal(url, response.status_code)
            yield _snapshots(response)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(f"--url {url}: {error}.", hint=f"It is as in {DEFAULT_URL}.") from error
    except httpx.HTTPError as error:
        raise Unavailable(
            f"No server answers at {url}: {str(error) or type(error).__name__}.",
            hint="`weft serve` starts one; --url names another.",
        ) from error


def _refusal(url: str, status: int) -> WeftError:
    match status:
        case 401 | 403:
            return Unavailable(f"The server at {url} wants an API key.", hint="--api-key or WEFT_API_KEY.")
        case 404:
            return Unavailable(
                f"The server at {url} has no live view.", hint="It is no Weft, or was started with --no-live."
            )
        case 429:
            return Unavailable(f"Too many watch the server at {url} already.", hint="Close another live view.")
    return Unavailable(f"The server at {url} answered with status {status}.")


def _snapshots(response: httpx.Response) -> Iterator[Snapshot]:
    from weft.serving.live import Snapshot

    received = bytearray()
    for piece in response.iter_bytes():
        received += piece
        if len(received) > MAX_EVENT_BYTES:
            raise Unavailable("The server sent an event that is too large.")
        while (end := received.find(b"\n\n")) >= 0:
            event = bytes(received[:end]).removeprefix(b"data: ")
            del received[: end + 2]
            try:
                yield msgspec.json.decode(event, type=Snapshot)
            except msgspec.DecodeError as error:
                raise Unavailable(
                    f"The server sent no live view: {error}.", hint="It may be of another version."
                ) from error
    raise Unavailable("The server ended the live view.")


def _settled(url: str, api_key: str) -> Snapshot:
    """Return a snapshot with speeds and the ended requests, which a stream's first two have between them."""
    with live_stream(url, api_key) as snapshots:
        first = next(snapshots)
        return msgspec.structs.replace(next(snapshots), ended=first.ended)
