"""The driver of vLLM's synchronous engine, LLMEngine, which a thread steps: requests and aborts reach it between steps,
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
    """Drives LLMEngine with a thread that steps it."""

    def __init__(self, vllm_config: Any, stats: VllmStats, open_requests: OpenRequests) -> None:
        """Load the model, which takes long."""
        self._engine = LLMEngine.from_vllm_config(vllm_config, stat_loggers=[stats.logger])
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Calls to be made between two steps; None: stop."""
        self._answers: dict[str, VllmAnswer] = {}
        self._adapters: set[int] = set()
        self._open_requests = open_requests
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="weft-vllm-steps", daemon=True)
        self._thread.start()

    def failure(self) -> BaseException | None:
        """Return None: the thread tells of its own errors."""
        return None

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._calls.put(partial(self._add, request))

    def abort(self, request_ids: Iterable[str]) -> None:
        self._calls.put(partial(self._abort, list(request_ids)))

    async def reset_prefix_cache(self) -> bool:
        done: Future[bool] = Future()
        self._calls.put(lambda: done.set_result(self._engine.reset_prefix_cache()))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join()
        self._engine.engine_core.shutdown()

    def _run(self) -> None:
        try:
            while self._make_calls():
                events = [self._answers[output.request_id].event(output) for output in self._engine.step()]
                for event in events:
                    if event.finish is not None:
                        del self._answers[event.request_id]
                if events:
                    self._loop.call_soon_threadsafe(self._open_requests.bring, events)
        except BaseException as error:  # noqa: BLE001 - after any error nothing is stepped any more
            self._loop.call_soon_threadsafe(self._open_requests.died, error)

    def _make_calls(self) -> bool:
        """Make the calls that wait; with nothing to compute, wait for one. Return False to stop."""
        while True:
            try:
                call = self._calls.get(block=not self._engine.has_unfinished_requests())
            except queue.Empty:
                return True
            if call is None:
                return False
            call()

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
            self._loop.call_soon_threadsafe(self._open_requests.fail, request.request_id, error)
        except REFUSALS as error:
            refusal = InvalidRequest(f"vLLM refuses this request: {error}")
            self._loop.call_soon_threadsafe(self._open_requests.fail, request.request_id, refusal)

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if self._answers.pop(request_id, None) is not None:
                self._engine.abort_request([request_id])

    def _adapted(self, adapter: Adapter) -> Any:
        """Have vLLM read an adapter before its first request: it would die of one that it cannot read in a step."""
        lora_request = adapter_request(adapter)
        if adapter.number not in self._adapters:
            try:
                self._engine.add_lora(lora_request)
            except Exception as error:
                raise InvalidRequest(f"vLLM cannot read the adapter {adapter.name}: {error}") from error
            self._adapters.add(adapter.number)
        return lora_request
