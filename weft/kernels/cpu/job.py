"""A step's native code is told these: records of addresses and sizes, laid out for numpy and for numba alike, and the
sizes on which the code and its callers agree."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from weft.kernels.cpu.compiled import WIDTH

KEYS = 128
"""Keys whose scores are held at once."""
QUERIES = 48
"""Query rows (tokens times the heads that share a kv head) that read them together."""
LANES = WIDTH
"""Rows of a panel."""
SCRATCH_FLOATS = 8 * LANES
"""The memory that a product with a panel needs."""
MOST_ROWS = 96
MOST_PIECE_ROWS = MOST_ROWS + LANES
"""The most rows of a matrix that a thread takes at a time."""
KV_FLOAT32, KV_FLOAT16, KV_INT8 = range(3)
"""Kinds of KV caches."""
# Cells that threads share, a cache line or two apart, in int64s.
CELLS = 48
CLAIMS, ARRIVALS = 16, 32


def _integers(names: str) -> list[tuple[str, type]]:
    return [(name, np.int64) for name in names.split()]


JOB = np.dtype(
    [
        *_integers("cells num_threads claims scratch scratch_stride"),
        # The sizes of the model, and its own memory.
        *_integers("hidden_size num_heads num_kv_heads head_dim intermediate_size vocab_size num_layers block_size"),
        *_integers("kv_kind kv_head_bytes"),
        *_integers("embedding embedding_kind norm head head_kind rotations"),
        # What is asked in this step: tokens, attention to be done for them, whose logits are wanted, and whose
        # hidden states.
        *_integers("num_tokens tokens positions slots num_items num_parts tables table_stride num_outputs outputs"),
        *_integers("num_hidden hidden_at num_runs run_tokens"),
        # Rows that stand in the place of tokens' embeddings.
        *_integers("num_embeds embeds_at embeds"),
        # What passes from one phase to the next, and what comes out.
        *_integers("residual x qkv attended gate_up gated y parts logits hidden shrunk shrunk_stride"),
        # The input of a quantised weight: whole numbers, the scales of blocks, and their sums.
        *_integers("numbers scales sums"),
        ("eps", np.float32),
        ("scale", np.float32),
    ]
)

LAYER = np.dtype(
    [
        *_integers("attention_norm qkv qkv_bias q_norm k_norm output output_bias mlp_norm gate_up down kv_cache"),
        *_integers("qkv_kind output_kind gate_up_kind down_kind index"),
    ]
)
"""Addresses, 0 for what a layer does not have; what kind its weights are, 0 for float32 and else a place in
`panel_format.FORMATS` from 1 on; and which layer it is."""

ITEM = np.dtype(_integers("token num_tokens sequence first stop position part"))
"""Attention of a few tokens of a sequence over a run of its keys. `part` is where the unfinished result goes to be
joined with those of the token's other runs, or -1 where there is only one run."""

RUN = np.dtype(_integers("first num_tokens places"))
"""Tokens with one adapter, from `first` on in the list at `JOB.run_tokens`, and the address of the adapter's places."""

QKV, OUTPUT, GATE_UP, DOWN = range(4)
PLACES = 4
"""The weights of a layer that an adapter may have a place for, as `AdaptedLayer` has them."""
PARTS, PART_FIELDS = 3, 5
FIRST_PART = 3
PLACE_FIELDS = FIRST_PART + PARTS * PART_FIELDS
"""The int64s of a place: the rank, 0 where there is nothing, whether matrices are of halves, and the address of the
first matrix, [rank, in]. Then for each part of a fused weight where its outputs begin and end, its first rank, its
rank, and the address of its second matrix in panels, [outputs / LANES, rank, LANES]. A first matrix of halves has
rows of zeros up to a multiple of four."""


class Here(NamedTuple):
    """The job that native code is at, and its place in it."""

    job: Any
    layer: Any
    items: int
    """The address of the step's items; the next, of its runs."""
    runs: int
    scratch: int
    """The address of the thread's own memory."""
