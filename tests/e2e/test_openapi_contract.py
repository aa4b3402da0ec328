"""The description that the server gives of itself, taken at its word: requests made from it, right and wrong ones, and
every answer checked against it."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from pydantic.json_schema import models_json_schema
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.e2e.hostile import BASES
from tests.e2e.tiny_server import NAME, TinyServer
from tests.effort import EFFORT
from tests.waiting import PATIENCE
from weft.api.app import ANSWERS, REQUESTS

NUM_CASES = 6 * EFFORT
NUM_LARGE_CASES = 3 * EFFORT
LARGE = ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/tokenize")
"""Conversations take long to make."""

SENSIBLE = {
    "temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "top_k": 30, "n": 2, "best_of": 2, "min_tokens": 2, "logprobs": 3,
    "presence_penalty": 1.5, "frequency_penalty": -1.5, "repetition_penalty": 1.2, "prompt_logprobs": 3, "priority": 5,
    "truncate_prompt_tokens": 20, "stop_token_ids": [7], "logit_bias": {"7": -5}, "dimensions": 96,
    "max_completion_tokens": 3,
}  # fmt: skip
"""The description tells types, not limits: what is beyond them is for the fuzz to try."""

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
PRIVATE = re.compile(r"Traceback|0x[0-9a-fA-F]{6,}|\.py\b|site-packages")


@pytest.fixture
def server(small_server: TinyServer) -> TinyServer:
    return small_server


def with_this_model(case: Case) -> Case:
    """A name at random would only ever be answered 404."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = NAME
    return case


def with_good_sense(case: Case) -> Case:
    """With a prompt that makes sense, and a short answer: a conversation at random breaks rules between its parts that
    no description can tell."""
    if isinstance(case.body, dict) and case.operation.path in BASES:
        case.body.update(BASES[case.operation.path], model=NAME)
        for name in case.body.keys() & SENSIBLE:
            case.body[name] = SENSIBLE[name]
    return case


def cases(operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode) -> SearchStrategy[Case]:
    made = operation.as_strategy(generation_mode=mode).map(with_this_model)
    if mode is GenerationMode.NEGATIVE or not operation.body:
        return made
    return made | made.map(with_good_sense)


def try_out(operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode, session: requests.Session) -> list[int]:
    """Returns the status of every answer."""
    statuses = []

    @settings(
        max_examples=NUM_LARGE_CASES if operation.path in LARGE else NUM_CASES,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases(operation, mode))
    def one(case: Case) -> None:
        response = case.call(session=session, timeout=PATIENCE)
        statuses.append(response.status_code)
        # Of a stream the description tells nothing but that it is one.
        streamed = response.headers["content-type"][0].startswith("text/event-stream")
        case.validate_response(response, checks=CHECKS, excluded_checks=[response_schema_conformance] * streamed)
        if response.status_code >= 400:
            assert not PRIVATE.search(response.text), response.text

    one()
    return statuses


def test_requests_made_from_the_description_are_answered_as_it_says(server: TinyServer) -> None:
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    statuses = []
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation = found.ok()
            statuses += try_out(operation, GenerationMode.POSITIVE, session)
            if operation.body:
                statuses += try_out(operation, GenerationMode.NEGATIVE, session)
    assert len(statuses) >= 100 * EFFORT
    assert statuses.count(200) >= 15 * EFFORT, "too few of them got as far as the engine"
    server.check_unharmed()


def test_no_name_in_the_description_stands_for_two_things() -> None:
    _, asked = models_json_schema([(request, "validation") for request in REQUESTS])
    _, answered = msgspec.json.schema_components(ANSWERS)
    assert not asked["$defs"].keys() & answered.keys()
