"""An engine that did not start: its reason is found by the type of the error, wherever it was raised."""

from __future__ import annotations

import json
import logging
import logging.config
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weft.backends.vllm.failure_causes import FailureCause, cause_of, load_failure, logging_config, noted
from weft.errors import ModelError, OutOfMemory


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def from_vllm(module: str, function: str, error: BaseException) -> BaseException:
    """Raised in a function of this name, of a module of this name."""
    place: dict[str, object] = {"__name__": module, "error": error}
    exec(f"def {function}():\n    raise error", place)
    try:
        place[function]()  # type: ignore[operator]
    except BaseException as caught:
        return caught
    raise AssertionError


@pytest.mark.parametrize(
    "error",
    [
        raised(torch.OutOfMemoryError("CUDA out of memory.")),
        raised(MemoryError()),
        raised(RuntimeError("warming up the sampler"), torch.OutOfMemoryError("CUDA out of memory.")),
        from_vllm("vllm.v1.core.kv_cache_utils", "_check_enough_kv_cache_memory", ValueError("no room")),
        from_vllm("vllm.v1.worker.utils", "request_memory", ValueError("less than desired")),
    ],
)
def test_a_shortage_of_memory_has_a_type_or_a_place(error: BaseException) -> None:
    assert cause_of(error).is_out_of_memory
    assert isinstance(load_failure(RuntimeError("see above"), [cause_of(error)]), OutOfMemory)
    assert isinstance(load_failure(error, []), OutOfMemory), "and in the same process too"


@pytest.mark.parametrize(
    "error",
    [
        raised(RuntimeError("CUDA out of memory")),
        raised(ValueError("No available memory for the cache blocks.")),
        from_vllm("vllm.v1.core.kv_cache_utils", "another_function", ValueError("no room")),
        from_vllm("vllm.v1.core.kv_cache_utils", "_check_enough_kv_cache_memory", TypeError("no room")),
    ],
)
def test_words_are_no_reason(error: BaseException) -> None:
    assert not cause_of(error).is_out_of_memory
    failure = load_failure(RuntimeError("see above"), [cause_of(error)])
    assert isinstance(failure, ModelError) and str(error) in failure.message


def test_the_first_error_is_told_and_a_shortage_before_all() -> None:
    first, second = FailureCause(message="KeyError: 'a'"), FailureCause(message="RuntimeError: b")
    assert "KeyError" in load_failure(RuntimeError("c"), [first, second]).message
    shortage = load_failure(RuntimeError("c"), [first, FailureCause(message="x", is_out_of_memory=True), second])
    assert isinstance(shortage, OutOfMemory) and "x" in shortage.message


@pytest.fixture
def vllm_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("vllm")
    before = logger.handlers, logger.level, logger.propagate
    yield logger
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_what_vllms_processes_log_is_noted_with_its_type(tmp_path: Path, vllm_logger: logging.Logger) -> None:
    causes = tmp_path / "causes.jsonl"
    assert noted(causes) == []
    logging.config.dictConfig(json.loads(logging_config("info", "text", causes)))
    try:
        raise torch.OutOfMemoryError("tried to allocate\n2 GiB")
    except torch.OutOfMemoryError:
        vllm_logger.getChild("v1.engine.core").exception("EngineCore failed to start.")
    vllm_logger.error("without an exception")
    (cause,) = noted(causes)
    assert cause.is_out_of_memory and cause.message == "OutOfMemoryError: tried to allocate 2 GiB"
    assert noted(causes, since=cause.at) == [cause] and noted(causes, since=cause.at + 1) == []
    assert vllm_logger.level == logging.WARNING and not vllm_logger.propagate
