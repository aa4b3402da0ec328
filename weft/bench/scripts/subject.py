"""The server that the eight commands measure, one that runs or one of their own; and how the commands end."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct

from weft.bench.serve import Target, own_server
from weft.errors import ConfigError, WeftError

Model = Annotated[str, typer.Option(help="What `weft serve` takes.", show_default="smollm2")]
Engine = Annotated[
    str, typer.Option(help="One of `weft engines`, such as cuda-vllm.", envvar="CY_LLM_ENGINE", show_default="native")
]
Url = Annotated[str, typer.Option(help="A server that runs already, instead of one of its own.")]
Grpc = Annotated[str, typer.Option("--address", help="Where it answers gRPC: host:port, or unix:/path.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the report to this file, as JSON.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")]
Runs = Annotated[int, typer.Option(min=1, help="Each figure is the median of so many runs.")]
Duration = Annotated[float, typer.Option(min=0.1, help="Seconds.")]


class Subject(Struct, frozen=True, kw_only=True):
    """A server that is ready."""

    target: Target
    grpc_address: str = ""
    """Empty: it is not known where it answers gRPC."""


@asynccontextmanager
async def subject(
    *, model: str, engine: str, url: str = "", grpc_address: str = "", flags: Sequence[str] = ()
) -> AsyncIterator[Subject]:
    """Yield the server at the addresses, or start one, with flags, for as long as it is needed."""
    if url or grpc_address:
        yield Subject(target=Target(url=url), grpc_address=grpc_address)
        return
    chosen = [*([model] if model else []), *(["--engine", engine] if engine else [])]
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        socket = f"{folder}/grpc.sock"
        async with own_server([*chosen, "--max-concurrent-per-key", "0", *flags], grpc_socket=socket) as (
            own_url,
            seconds,
        ):
            yield Subject(target=Target(url=own_url, startup_seconds=seconds), grpc_address=f"unix:{socket}")


def command(function: object) -> typer.Typer:
    """Return an application of one command."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(function)  # type: ignore[type-var]
    return app


def main(app: typer.Typer) -> None:
    """Run the command; an error meant for the user is a line, and never a traceback."""
    try:
        app()
    except WeftError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)
