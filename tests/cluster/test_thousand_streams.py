"""Many streams through several edges, in small (tests/cluster/thousand_streams.py)."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

from tests.cluster.thousand_streams import Cluster, expected_texts, run

NUM_STREAMS, NUM_TOKENS = 60, 120


def test_no_token_is_lost_or_repeated_when_a_replica_of_several_edges_dies(tiny_model: Path, cluster_key: Path) -> None:
    prompts = [f"Stream {number} runs" for number in range(NUM_STREAMS)]
    expected = expected_texts(tiny_model, prompts, NUM_TOKENS)
    with ExitStack() as stack:
        cluster = Cluster(stack, tiny_model, cluster_key, num_edges=2, num_replicas=2, num_tokens=NUM_TOKENS)
        outcome = asyncio.run(run(cluster, prompts, expected))
    assert outcome.is_right and outcome.tokens == NUM_STREAMS * NUM_TOKENS
    # Two edges that do not talk to each other share replicas by what these tell of themselves.
    assert outcome.moved == outcome.placed[cluster.replicas[0].address] >= NUM_STREAMS // 5
