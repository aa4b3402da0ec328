"""Compare what is streamed with what is answered in one piece, over HTTP and gRPC."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from weft.bench.datasets import Dialogue, DialogueTurn, standard_prompts
from weft.bench.generator import run
from weft.bench.grpc_load import GrpcClient, open_channel
from weft.bench.http import Address
from weft.bench.http_load import HttpClient, exchange, first_models
from weft.bench.load_commands import write
from weft.bench.report import environment
from weft.bench.scripts.subject import Engine, Grpc, MaxTokens, Model, Output, Url, command, main, subject
from weft.errors import ConfigError


class CheckedContent(Struct, frozen=True, kw_only=True):
    """One prompt, the ways that its text came, and whether all are the same."""

    prompt: str
    ways: dict[str, int]
    """The ways, with the number of pieces of each."""
    same: bool
    text: str


class ContentReport(Struct, frozen=True, kw_only=True):
    checked: list[CheckedContent]
    differs_from_before: list[str]
    """Prompts whose text is another one where every chunk is sent by itself."""
    environment: dict[str, object]


def verify(
    model: Model = "",
    engine: Engine = "",
    url: Url = "",
    address: Grpc = "",
    max_tokens: MaxTokens = 64,
    compare_before_after: Annotated[
        bool, typer.Option("--compare-before-after", help="Compare with a server that joins no chunks, too.")
    ] = False,
    output: Output = None,
) -> None:
    """Compare what is streamed with what is answered in one piece, over HTTP and gRPC, for the standard prompts. The
    exit code is 1 where a byte differs."""
    if compare_before_after and (url or address):
        raise ConfigError("--compare-before-after needs servers of its own.", hint="Leave out --url and --address.")
    report = run(_verified(model, engine, url, address, max_tokens, compares=compare_before_after))
    table = Table("prompt", "ways and their pieces", "", box=None)
    for each in report.checked:
        ways = ", ".join(f"{name} {count}" for name, count in each.ways.items())
        table.add_row(each.prompt, ways, "same" if each.same else "DIFFERENT", style=None if each.same else "red")
    console = Console()
    console.print(table)
    for prompt in report.differs_from_before:
        console.print(f"{prompt}: another text than before", style="red")
    write(report, output)
    if report.differs_from_before or not all(each.same for each in report.checked):
        raise typer.Exit(1)


async def _verified(
    model: str, engine: str, url: str, grpc_address: str, max_tokens: int, *, compares: bool
) -> ContentReport:
    async def checked(*flags: str) -> list[CheckedContent]:
        async with subject(model=model, engine=engine, url=url, grpc_address=grpc_address, flags=flags) as found:
            return [
                await _checked(found.target.url, found.grpc_address, each.id, each.prompt, max_tokens)
                for each in standard_prompts()
            ]

    after = await checked()
    before = await checked("--grpc-buffer-size", "1") if compares else after
    differs = [ours.prompt for ours, theirs in zip(after, before, strict=True) if ours.text != theirs.text]
    return ContentReport(
        checked=after + (before if compares else []), differs_from_before=differs, environment=environment()
    )


async def _checked(url: str, grpc_address: str, name: str, prompt: str, max_tokens: int) -> CheckedContent:
    texts: dict[str, tuple[str, int]] = {}
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    if url:
        address = Address.parse(url)
        asked = {**body, "model": (await first_models(address))[0]}
        texts["whole"] = (await _whole(address, asked), 1)
        client = HttpClient(address, asked["model"], {}, keeps_text=True)
        [answer] = await client.converse(Dialogue([DialogueTurn(path="/v1/completions", body=body)]))
        await client.close()
        texts["streamed"] = (answer.text, answer.num_messages)
    if grpc_address:
        async with open_channel(grpc_address) as channel:
            [answer] = await GrpcClient(channel, {}).converse(Dialogue([DialogueTurn(path="", body=body)]))
        texts["gRPC"] = (answer.text or answer.reason, answer.num_messages)
    found = [text for text, _ in texts.values()]
    return CheckedContent(
        prompt=name,
        ways={way: count for way, (_, count) in texts.items()},
        same=len(set(found)) == 1,
        text=found[0],
    )


async def _whole(address: Address, body: dict[str, Any]) -> str:
    status, answer = await exchange(address, "POST", "/v1/completions", msgspec.json.encode(body))
    return str(msgspec.json.decode(answer)["choices"][0]["text"]) if status == 200 else f"status {status}"


app = command(verify)

if __name__ == "__main__":
    main(app)
