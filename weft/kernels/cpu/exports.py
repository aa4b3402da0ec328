"""The kernels that Python calls: a decoder's step, and the greatest elements of rows. `python -m
weft.kernels.cpu.exports NAME...` compiles these, or others of `jit.EXPORTS`, and writes their object files to its
output.
"""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import msgspec
import numpy as np

from weft.kernels.cpu import phases
from weft.kernels.cpu.jit import export, object_code, types
from weft.kernels.cpu.job import JOB, LAYER, Here
from weft.kernels.cpu.phases import num_pieces
from weft.kernels.cpu.raw_memory import at, floats, ints, record_at

_job_at, _layer_at = record_at(JOB), record_at(LAYER)


@export(types.void(*[types.int64] * 5))
def step(job_at: int, layers: int, items: int, runs: int, thread: int) -> None:
    """A thread's share of the step that a job describes."""
    job = _job_at(job_at, 0)
    num_tokens, num_items, num_runs = job.num_tokens, job.num_items, job.num_runs
    qkv_size = (job.num_heads + 2 * job.num_kv_heads) * job.head_dim
    hidden_size, intermediate_size = job.hidden_size, job.intermediate_size
    here = Here(job, _layer_at(layers, 0), items, runs, job.scratch + thread * job.scratch_stride)
    base = phases.embed(here, num_tokens, job.claims)
    if job.num_given:
        base = phases.place_given(here, job.num_given, base)
    for i in range(job.num_layers):
        here = Here(job, _layer_at(layers, i), items, runs, here.scratch)
        layer = here.layer
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
        if layer.output_kind:
            base = phases.quantise_attended(here, num_tokens, base)
        base = phases.output(here, num_pieces(job, hidden_size, job.num_heads * job.head_dim), base)
        base = phases.mlp_norm(here, num_tokens, base)
        if num_runs:
            base = phases.shrink_gate_up(here, num_runs, base)
        base = phases.gate_up(here, num_pieces(job, intermediate_size, hidden_size), base)
        if num_runs:
            base = phases.shrink_down(here, num_runs, base)
        if layer.down_kind:
            base = phases.quantise_gated(here, num_tokens, base)
        base = phases.down(here, num_pieces(job, hidden_size, intermediate_size), base)
    if job.num_hidden:
        base = phases.hidden_norm(here, job.num_hidden, base)
    base = phases.final_norm(here, job.num_outputs, base)
    phases.head(here, num_pieces(job, job.vocab_size, hidden_size), base)


# Floats compared before a row's winner so far is looked at again.
_RUN = 256


@export(types.void(*[types.int64] * 4))
def argmax(logits: int, num_rows: int, size: int, out: int) -> None:
    for row in range(num_rows):
        x = at(floats(logits), row * size)
        best, where = np.float32(-np.inf), 0
        for start in range(0, size, _RUN):
            run = at(x, start)
            count = min(_RUN, size - start)
            # Whether any is greater, or a NaN, without a branch.
            beaten = 0
            for i in range(count):
                beaten += not (run[i] <= best)
            if beaten:
                for i in range(count):
                    if run[i] > best or run[i] != run[i]:
                        best, where = run[i], start + i
                        if best != best:
                            break
                if best != best:
                    break
        ints(out)[row] = where


if __name__ == "__main__":
    # Nothing that a compiler makes is garbage before its end.
    gc.disable()
    # This process has one thread. What it has imported, its forks need not.
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        objects = dict(zip(sys.argv[1:], pool.map(object_code, sys.argv[1:]), strict=True))
    sys.stdout.buffer.write(msgspec.msgpack.encode(objects))
