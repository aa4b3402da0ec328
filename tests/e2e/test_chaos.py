"""A sample of `make chaos`: an engine fails in a step, is killed, is stopped, and is killed as it starts."""

from __future__ import annotations

from tests.chaos import READY, SERVING, STARTING, Settings, run
from tests.e2e.mixed_load import requests

PLAN = (("exception", SERVING), ("kill", SERVING), ("stop", READY), ("kill", STARTING))


def test_no_client_notices_that_engines_die() -> None:
    # The kernels may have to be compiled first.
    outcome = run(Settings(kills=len(PLAN), plan=PLAN, clients=3, variants=1, start_timeout_s=600))
    assert (outcome.lost, outcome.differing, outcome.orphans) == ([], [], [])
    assert [kill.kind for kill in outcome.kills] == [kind for kind, _ in PLAN]
    assert outcome.num_unrecovered == 0
    assert outcome.answered.keys() == {request.kind for request in requests(1)}
