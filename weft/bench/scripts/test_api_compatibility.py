"""Check that everything that the CY-LLM Engine's callers use is there and answers as they expect."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator
from typing import Any, get_type_hints

import grpc.aio
import msgspec
import typer
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from weft.api.grpc.ai_service_pb2 import (
    ControlMessage,
    GenerationParameters,
    StreamMetadata,
    StreamPredictRequest,
    StreamPredictResponse,
    WorkerHealthRequest,
    WorkerHealthResponse,
)
from weft.api.grpc.inference import SERVICE_NAME
from weft.backends import DEFAULT_ENGINE_PRIORITY, BaseEngine, EngineFactory, check_engine_available, create_engine
from weft.bench.generator import run
from weft.bench.grpc_load import open_channel
from weft.bench.http import Address
from weft.bench.http_load import exchange, first_models
from weft.bench.load_commands import write
from weft.bench.progress_line import progress
from weft.bench.report import environment
from weft.bench.scripts.subject import Engine, Grpc, Model, Output, Url, command, main, subject
from weft.errors import WeftError


class Check(Struct, frozen=True, kw_only=True):
    name: str
    problem: str = ""
    """Empty: it is as it should be."""


class CompatibilityReport(Struct, frozen=True, kw_only=True):
    checks: list[Check]
    environment: dict[str, object]


def compatibility(
    model: Model = "", engine: Engine = "", url: Url = "", address: Grpc = "", output: Output = None
) -> None:
    """Check the frozen interfaces: the engine's Python contract, OpenAI's endpoints, and gRPC's messages. The exit code
    is 1 where one is not as it was."""
    checks = run(_checked(model, engine, url, address))
    table = Table("interface", "", box=None)
    for check in checks:
        table.add_row(check.name, check.problem or "as it was", style="red" if check.problem else None)
    console = Console()
    console.print(table)
    console.print(f"{sum(not check.problem for check in checks)} of {len(checks)} are as they were.")
    write(CompatibilityReport(checks=checks, environment=environment()), output)
    if any(check.problem for check in checks):
        raise typer.Exit(1)


async def _checked(model: str, engine: str, url: str, grpc_address: str) -> list[Check]:
    checks = [_outcome(name, check) for name, check in PYTHON_CHECKS.items()]
    async with subject(model=model, engine=engine, url=url, grpc_address=grpc_address) as found:
        with progress(len(HTTP_CHECKS) + len(GRPC_CHECKS), "asking") as advance:
            if found.target.url:
                server = _Http(Address.parse(found.target.url))
                for name, over_http in HTTP_CHECKS.items():
                    checks.append(await _awaited(name, over_http(server)))
                    advance(name)
            if found.grpc_address:
                async with open_channel(found.grpc_address) as channel:
                    for name, over_grpc in GRPC_CHECKS.items():
                        checks.append(await _awaited(name, over_grpc(channel)))
                        advance(name)
    return checks


def _outcome(name: str, check: Callable[[], None]) -> Check:
    try:
        check()
    except (AssertionError, WeftError, LookupError, TypeError, ValueError) as error:
        return Check(name=name, problem=f"{type(error).__name__}: {error}"[:200])
    return Check(name=name)


async def _awaited(name: str, check: Awaitable[None]) -> Check:
    try:
        await check
    except (AssertionError, OSError, LookupError, TypeError, ValueError, grpc.aio.AioRpcError) as error:
        return Check(name=name, problem=f"{type(error).__name__}: {error}"[:200])
    return Check(name=name)


def _expect(found: object, wanted: object, what: str) -> None:
    if found != wanted:
        raise AssertionError(f"{what} is {found!r}, not {wanted!r}")


# The engine's contract.


def _load_model() -> None:
    names = list(inspect.signature(BaseEngine.load_model).parameters)
    _expect(names, ["self", "model_path", "adapter_path", "kwargs"], "load_model's parameters")


def _infer() -> None:
    _expect(list(inspect.signature(BaseEngine.infer).parameters), ["self", "prompt", "kwargs"], "infer's parameters")
    hints = get_type_hints(BaseEngine.infer, globalns={"Generator": Generator, "Any": Any})
    _expect(hints["return"], Generator[str, None, None], "infer's result")


def _other_methods() -> None:
    names = ("unload_model", "get_memory_usage", "get_model_info", "health_check", "async_infer")
    missing = [name for name in names if not callable(getattr(BaseEngine, name, None))]
    _expect(missing, [], "what is missing")
    _expect(isinstance(inspect.getattr_static(BaseEngine, "is_async"), property), True, "is_async as a property")


def _factory() -> None:
    _expect(next(iter(inspect.signature(create_engine).parameters)), "engine_type", "create_engine's first parameter")
    for name in ("create", "register", "auto_detect"):
        _expect(callable(getattr(EngineFactory, name, None)), True, f"EngineFactory.{name}")
    _expect(isinstance(check_engine_available("cuda-vllm"), bool), True, "check_engine_available as a bool")


def _default_engine() -> None:
    _expect(DEFAULT_ENGINE_PRIORITY["cuda"], "cuda-vllm-async", "DEFAULT_ENGINE_PRIORITY['cuda']")


PYTHON_CHECKS: dict[str, Callable[[], None]] = {
    "BaseEngine.load_model(model_path, adapter_path=None, **kwargs)": _load_model,
    "BaseEngine.infer(prompt, **kwargs) -> Generator": _infer,
    "BaseEngine's other methods": _other_methods,
    "EngineFactory, create_engine, check_engine_available": _factory,
    "DEFAULT_ENGINE_PRIORITY['cuda']": _default_engine,
}


# OpenAI's endpoints.


class _Http:
    def __init__(self, address: Address) -> None:
        self._address = address

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        return await exchange(self._address, method, path, b"" if body is None else msgspec.json.encode(body))

    async def model(self) -> str:
        return (await first_models(self._address))[0]

    async def chat(self, **fields: Any) -> tuple[int, bytes]:
        messages = [{"role": "user", "content": "Say hello."}]
        body = {"model": await self.model(), "messages": messages, "max_tokens": 8, "temperature": 0, **fields}
        return await self.ask("POST", "/v1/chat/completions", body)


async def _chat(server: _Http) -> None:
    status, body = await server.chat()
    _expect(status, 200, "the status")
    answer = msgspec.json.decode(body)
    _expect(answer["object"], "chat.completion", "object")
    _expect(answer["choices"][0]["message"]["role"], "assistant", "the role")
    _expect(answer["choices"][0]["finish_reason"] in ("stop", "length"), True, "a known finish_reason")
    _expect(answer["usage"]["completion_tokens"] <= 8, True, "usage within max_tokens")


async def _streamed_chat(server: _Http) -> None:
    status, body = await server.chat(stream=True)
    _expect(status, 200, "the status")
    events = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    _expect(events[-1], "[DONE]", "the last event")
    chunks = [msgspec.json.decode(event) for event in events[:-1]]
    _expect({chunk["object"] for chunk in chunks}, {"chat.completion.chunk"}, "the chunks' object")
    streamed = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    whole = msgspec.json.decode((await server.chat())[1])["choices"][0]["message"]["content"]
    _expect(streamed, whole, "the streamed text")


async def _completion(server: _Http) -> None:
    body = {"model": await server.model(), "prompt": "One, two,", "max_tokens": 4, "temperature": 0}
    status, answer = await server.ask("POST", "/v1/completions", body)
    _expect(status, 200, "the status")
    read = msgspec.json.decode(answer)
    _expect(read["object"], "text_completion", "object")
    _expect(isinstance(read["choices"][0]["text"], str), True, "text as a string")


async def _models(server: _Http) -> None:
    status, body = await server.ask("GET", "/v1/models")
    _expect(status, 200, "the status")
    _expect(msgspec.json.decode(body)["object"], "list", "object")


async def _health(server: _Http) -> None:
    _expect((await server.ask("GET", "/health"))[0], 200, "the status")


async def _error(server: _Http) -> None:
    status, body = await server.chat(temperature=-1)
    _expect(status, 400, "the status of a temperature of -1")
    error = msgspec.json.decode(body)["error"]
    _expect(error.keys() >= {"message", "type", "param", "code"}, True, "OpenAI's shape of errors")


HTTP_CHECKS: dict[str, Callable[[_Http], Awaitable[None]]] = {
    "POST /v1/chat/completions": _chat,
    "POST /v1/chat/completions, streamed": _streamed_chat,
    "POST /v1/completions": _completion,
    "GET /v1/models": _models,
    "GET /health": _health,
    "errors": _error,
}


# gRPC.


async def _predict(channel: grpc.aio.Channel) -> None:
    method = channel.stream_stream(
        f"/{SERVICE_NAME}/StreamPredict", StreamPredictRequest.SerializeToString, StreamPredictResponse.FromString
    )
    request = StreamPredictRequest(
        model_id="default",
        prompt="Hello",
        generation=GenerationParameters(max_new_tokens=8, temperature=0.0, top_p=1.0, repetition_penalty=1.0),
        metadata=StreamMetadata(trace_id="compatibility"),
    )
    responses = [response async for response in method(iter([request]))]
    _expect([response.index for response in responses], [*range(len(responses))], "the indexes")
    _expect({response.trace_id for response in responses}, {"compatibility"}, "the trace ids")
    _expect(responses[-1].end_of_stream, True, "end_of_stream of the last")
    _expect(responses[-1].ttft_ms > 0 and responses[-1].tokens_per_sec > 0, True, "ttft_ms and tokens_per_sec above 0")


async def _control(channel: grpc.aio.Channel) -> None:
    method = channel.unary_unary(
        f"/{SERVICE_NAME}/Control", ControlMessage.SerializeToString, ControlMessage.FromString
    )
    for name in ("ping", "list_models"):
        answer = await method(ControlMessage(trace_id="t", command=name))
        _expect(answer.command, f"{name}_response", "the answer's command")
        _expect(answer.payload["status"], "ok", "the status")


async def _worker_health(channel: grpc.aio.Channel) -> None:
    method = channel.unary_unary(
        f"/{SERVICE_NAME}/Health", WorkerHealthRequest.SerializeToString, WorkerHealthResponse.FromString
    )
    answer = await method(WorkerHealthRequest(trace_id="t"))
    _expect(answer.healthy, True, "healthy")


GRPC_CHECKS: dict[str, Callable[[grpc.aio.Channel], Awaitable[None]]] = {
    "AiInference.StreamPredict": _predict,
    "AiInference.Control": _control,
    "AiInference.Health": _worker_health,
}

app = command(compatibility)

if __name__ == "__main__":
    main(app)
