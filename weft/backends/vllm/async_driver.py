"""vLLM's asynchronous engine, AsyncLLM, on the event loop of its process. What it computes with is another process."""

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
    def __init__(self, vllm_config: Any, figures: VllmStats, desk: OpenRequests) -> None:
        """Loads the model: takes long."""
        self._llm = AsyncLLM.from_vllm_config(vllm_config, stat_loggers=[figures.logger])
        self._desk = desk
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
        """A cancelled `generate` aborts its request."""
        for request_id in request_ids:
            if (task := self._answering.get(request_id)) is not None:
                task.cancel()

    async def forget_prompts(self) -> bool:
        return bool(await self._llm.reset_prefix_cache())

    def close(self) -> None:
        self._llm.shutdown()

    def _forget(self, request_id: str, task: asyncio.Task[None]) -> None:
        del self._answering[request_id]

    async def _answer(self, request: Request) -> None:
        answer, desk = VllmAnswer(request), self._desk
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
                desk.bring([answer.event(output)])
        except WeftError as error:
            desk.fail(request.request_id, error)
        except EngineGenerateError as error:
            desk.fail(request.request_id, EngineFault(f"vLLM failed on this request: {error.__cause__}"))
        except REFUSALS as error:
            desk.fail(request.request_id, InvalidRequest(f"vLLM refuses this request: {error}"))
        except Exception as error:  # noqa: BLE001 - an EngineDeadError, or what nobody foresaw: every request must end
            desk.died(error)

    async def _adapted(self, adapter: Adapter) -> Any:
        """vLLM would die of an adapter that it cannot read, if it met it in a step: it is asked to read it before."""
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
