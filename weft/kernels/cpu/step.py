"""A decoder's whole step in native code, run by every thread of a team at once.

In Python a step is some thousand calls of small ops, whose code and data fall out of the caches while the weights
stream through: 30 ms for one token of SmolLM2-135M where its weights can be read in 14 ms.
"""

from __future__ import annotations

from typing import Any

from weft.kernels.cpu import phases
from weft.kernels.cpu.jit import entry, types
from weft.kernels.cpu.job import ITEMS, JOBS, LAYERS, RUNS, Here
from weft.kernels.cpu.phases import num_pieces


@entry((JOBS, LAYERS, ITEMS, RUNS, types.int64))
def step(jobs: Any, layers: Any, items: Any, runs: Any, thread: int) -> None:
    """A thread's share of the step that jobs[0] describes."""
    job = jobs[0]
    num_tokens, num_items, num_runs = job.num_tokens, job.num_items, job.num_runs
    qkv_size = (job.num_heads + 2 * job.num_kv_heads) * job.head_dim
    hidden_size, intermediate_size = job.hidden_size, job.intermediate_size
    here = Here(job, layers[0], items, runs, job.scratch + thread * job.scratch_stride)
    base = phases.embed(here, num_tokens, job.claims)
    for i in range(job.num_layers):
        here = Here(job, layers[i], items, runs, here.scratch)
        base = phases.attention_norm(here, num_tokens, base)
        if num_runs:
            base = phases.shrink_qkv(here, num_runs, base)
        base = phases.qkv(here, num_pieces(job, qkv_size, hidden_size), base)
        base = phases.rotate_and_store(here, num_tokens, base)
        base = phases.attend(here, num_items * job.num_kv_heads, base)
        if job.num_parts:
            base = phases.join(here, num_items, base)
        if num_runs:
            base = phases.shrink_output(here, num_runs, base)
        base = phases.output(here, num_pieces(job, hidden_size, job.num_heads * job.head_dim), base)
        base = phases.mlp_norm(here, num_tokens, base)
        if num_runs:
            base = phases.shrink_gate_up(here, num_runs, base)
        base = phases.gate_up(here, num_pieces(job, intermediate_size, hidden_size), base)
        if num_runs:
            base = phases.shrink_down(here, num_runs, base)
        base = phases.down(here, num_pieces(job, hidden_size, intermediate_size), base)
    if job.num_hidden:
        base = phases.hidden_norm(here, job.num_hidden, base)
    base = phases.final_norm(here, job.num_outputs, base)
    phases.head(here, num_pieces(job, job.vocab_size, hidden_size), base)
