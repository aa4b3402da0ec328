"""vLLM's synchronous engine, LLMEngine, stepped by a thread of its own: requests and aborts reach it between two steps,
and what a step brought goes to the event loop in one piece.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from vllm.v1.engine.llm_engine import LLMEngine

from weft.backends.vllm.open_requests import OpenRequests
from weft.backends.vllm.sampling_params import VllmAnswer
from weft.backends.vllm.stats import VllmStats
from weft.backends.vllm.vllm_inputs import REFUSALS, adapter_request, sampling_params, tokens_prompt
from weft.errors import InvalidRequest, WeftError
from weft.types import Adapter, Request


class SyncDriver:
    def __init__(self, vllm_config: Any, figures: VllmStats, desk: OpenRequests) -> None:
        """Loads the model: takes long."""
        self._engine = LLMEngine.from_vllm_config(vllm_config, stat_loggers=[figures.logger])
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """What is done between two steps; None: no more."""
        self._answers: dict[str, VllmAnswer] = {}
        self._adapters: set[int] = set()
        self._desk = desk
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="weft-vllm-steps", daemon=True)
        self._thread.start()

    def failure(self) -> BaseException | None:
        """A thread that ends for an error tells the desk of it."""
        return None

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._orders.put(partial(self._add, request))

    def abort(self, request_ids: Iterable[str]) -> None:
        self._orders.put(partial(self._abort, list(request_ids)))

    async def forget_prompts(self) -> bool:
        done: Future[bool] = Future()
        self._orders.put(lambda: done.set_result(self._engine.reset_prefix_cache()))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        self._orders.put(None)
        self._thread.join()
        self._engine.engine_core.shutdown()

    def _run(self) -> None:
        try:
            while self._take_orders():
                events = [self._answers[output.request_id].event(output) for output in self._engine.step()]
                for event in events:
                    if event.finish is not None:
                        del self._answers[event.request_id]
                if events:
                    self._loop.call_soon_threadsafe(self._desk.bring, events)
        except BaseException as error:  # noqa: BLE001 - whatever it is, nothing is stepped any more
            self._loop.call_soon_threadsafe(self._desk.died, error)

    def _take_orders(self) -> bool:
        """Do what was asked for; with nothing to compute, wait until something is. False: stop."""
        while True:
            try:
                order = self._orders.get(block=not self._engine.has_unfinished_requests())
            except queue.Empty:
                return True
            if order is None:
                return False
            order()

    def _add(self, request: Request) -> None:
        try:
            self._engine.add_request(
                request.request_id,
                tokens_prompt(request),
                sampling_params(request),
                lora_request=None if request.adapter is None else self._adapted(request.adapter),
                priority=request.priority,
            )
            self._answers[request.request_id] = VllmAnswer(request)
        except WeftError as error:
            self._loop.call_soon_threadsafe(self._desk.fail, request.request_id, error)
        except REFUSALS as error:
            refusal = InvalidRequest(f"vLLM refuses this request: {error}")
            self._loop.call_soon_threadsafe(self._desk.fail, request.request_id, refusal)

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if self._answers.pop(request_id, None) is not None:
                self._engine.abort_request([request_id])

    def _adapted(self, adapter: Adapter) -> Any:
        """vLLM would die of an adapter that it cannot read, if it met it in a step: it is asked to read it before."""
        lora_request = adapter_request(adapter)
        if adapter.number not in self._adapters:
            try:
                self._engine.add_lora(lora_request)
            except Exception as error:
                raise InvalidRequest(f"vLLM cannot read the adapter {adapter.name}: {error}") from error
            self._adapters.add(adapter.number)
        return lora_request
