"""How much of Weft one streamed chat takes: `python -m tests.chat_walk` prints what is held to its bounds here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chat_walk import ChatTrace, lines_by_package, report, trace_chat

MAX_WALK_FILES = 30
MAX_CLOSURE_LINES = 43_500
NOT_FOR_A_CHAT = ("weft.backends.vllm", "weft.backends.openai_server", "weft.compat", "weft.bench", "weft.api.grpc")


@pytest.fixture(scope="module")
def trace(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> ChatTrace:
    trace = trace_chat(tiny_model, tmp_path_factory.mktemp("chat"))
    print("\n".join(report(trace)))
    return trace


def test_a_chat_walks_through_few_files(trace: ChatTrace) -> None:
    # A heartbeat of the engine may come before the request.
    first = next(module for module in trace.walk if not module.startswith("weft.engine."))
    assert first == "weft.api.http_protocol"
    assert {"weft.engine.client", "weft.text.detokenizer"} <= set(trace.walk)
    assert len(trace.walk) <= MAX_WALK_FILES, trace.walk


def test_a_chat_loads_a_part_of_weft(trace: ChatTrace) -> None:
    assert {"weft.api.server", "weft.scheduler.scheduler", "weft.worker.runner"} <= trace.closure
    assert lines_by_package(trace).total() < MAX_CLOSURE_LINES
    assert not [module for module in trace.closure if module.startswith(NOT_FOR_A_CHAT)]
