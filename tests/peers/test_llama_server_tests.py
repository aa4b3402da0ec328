"""What `make show-llamacpp-tests` makes of results."""

from __future__ import annotations

import pytest

from tests.peers.llama_server_tests import told

LISTED = {"chat::test_one": "why", "chat::test_many[2]": "why"}
AS_LISTED = {"chat::test_one": "assert", "chat::test_many[1]": "", "chat::test_many[2]": "assert", "chat::test_b": ""}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"chat::test_b": "assert 1 == 2"}, "FAILED   chat::test_b: assert 1 == 2"),
        ({"chat::test_many[2]": ""}, "PASSED   chat::test_many[2], which was expected to differ: why"),
        ({"chat::test_one": None}, "NOT RUN  chat::test_one, which was expected to differ: why"),
    ],
)
def test_whatever_is_not_as_listed_fails(
    changed: dict[str, str | None], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {test: failure for test, failure in (AS_LISTED | changed).items() if failure is not None}
    assert told(results.items(), LISTED) == 1
    assert line in capsys.readouterr().out.splitlines()
    assert told(AS_LISTED.items(), LISTED) == 0
