"""The driver of vLLM's asynchronous engine, AsyncLLM, on the event loop of this process; vLLM computes in another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from weft.backends.vllm.open_requests import OpenRequests
from weft.backends.vllm.sampling_params import VllmAnswer
from weft.backends.vllm.stats import VllmStats
from weft.backends.vllm.vllm_inputs import REFUSALS, adapter_request, sampling_params, tokens_prompt
from weft.errors import EngineFault, InvalidRequest, WeftError
from weft.types import Adapter, Request


class AsyncDriver:
    """Drives AsyncLLM with a task for every request."""

    def __init__(self, vllm_config: Any, stats: VllmStats, open_requests: OpenRequests) -> None:
        """Load the model, which takes long."""
        self._llm = AsyncLLM.from_vllm_config(vllm_config, stat_loggers=[stats.logger])
        self._open_requests = open_requests
        self._answering: dict[str, asyncio.Task[None]] = {}
        self._adapters: set[int] = set()

    def failure(self) -> BaseException | None:
        return self._llm.dead_error if self._llm.errored else None

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            task = asyncio.create_task(self._answer(request))
            self._answering[request.request_id] = task
            task.add_done_callback(partial(self._forget, request.request_id))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests: a cancelled `generate` aborts its own."""
        for request_id in request_ids:
            if (task := self._answering.get(request_id)) is not None:
                task.cancel()

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._llm.reset_prefix_cache())

    def close(self) -> None:
        self._llm.shutdown()

    def _forget(self, request_id: str, task: asyncio.Task[None]) -> None:
        del self._answering[request_id]

    async def _answer(self, request: Request) -> None:
        answer, open_requests = VllmAnswer(request), self._open_requests
        try:
            lora_request = None if request.adapter is None else await self._adapted(request.adapter)
            outputs = self._llm.generate(
                tokens_prompt(request),
                sampling_params(request),
                request.request_id,
                lora_request=lora_request,
                priority=request.priority,
            )
            async for output in outputs:
                open_requests.bring([answer.event(output)])
        except WeftError as error:
            open_requests.fail(request.request_id, error)
        except EngineGenerateError as error:
            open_requests.fail(request.request_id, EngineFault(f"vLLM failed on this request: {error.__cause__}"))
        except REFUSALS as error:
            open_requests.fail(request.request_id, InvalidRequest(f"vLLM refuses this request: {error}"))
        except Exception as error:  # noqa: BLE001 - an EngineDeadError, or an unknown one: every request must end
            open_requests.died(error)

    async def _adapted(self, adapter: Adapter) -> Any:
        """Have vLLM read an adapter before its first request: it would die of one that it cannot read in a step."""
        lora_request = adapter_request(adapter)
        if adapter.number not in self._adapters:
            try:
                await self._llm.add_lora(lora_request)
            except EngineDeadError:
                raise
            except Exception as error:
                raise InvalidRequest(f"vLLM cannot read the adapter {adapter.name}: {error}") from error
            self._adapters.add(adapter.number)
        return lora_request
