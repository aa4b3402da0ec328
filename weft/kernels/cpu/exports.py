"""The kernels that Python calls: a decoder's step, parts of it, and the greatest elements of rows. `python -m
weft.kernels.cpu.exports NAME...` compiles these, or others of `jit.EXPORTS`, and writes their object files to its
output.
"""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import msgspec
import numpy as np

from weft.kernels.cpu import phases
from weft.kernels.cpu.jit import export, inner, object_code, types
from weft.kernels.cpu.job import JOB, LAYER, Here
from weft.kernels.cpu.phases import num_pieces
from weft.kernels.cpu.raw_memory import at, floats, ints, record_at

_job_at, _layer_at = record_at(JOB), record_at(LAYER)


@inner
def _attention(here: Here, base: int) -> Any:
    """The first half of a layer."""
    job, layer = here.job, here.layer
    num_tokens, num_runs, hidden_size = job.num_tokens, job.num_runs, job.hidden_size
    q_size = job.num_heads * job.head_dim
    qkv_size = (job.num_heads + 2 * job.num_kv_heads) * job.head_dim
    base = phases.attention_norm(here, num_tokens, base)
    if num_runs:
        base = phases.shrink_qkv(here, num_runs, base)
    base = phases.qkv(here, num_pieces(job, qkv_size, hidden_size), base)
    base = phases.rotate_and_store(here, num_tokens, base)
    base = phases.attend(here, job.num_items * job.num_kv_heads, base)
    if job.num_parts:
        base = phases.join(here, job.num_items, base)
    if num_runs:
        base = phases.shrink_output(here, num_runs, base)
    if layer.output_kind:
        base = phases.quantise_attended(here, num_tokens, base)
    return phases.output(here, num_pieces(job, hidden_size, q_size), base)


@inner
def _mlp(here: Here, base: int) -> Any:
    """The second half of a layer."""
    job, layer = here.job, here.layer
    num_tokens, num_runs, hidden_size, size = job.num_tokens, job.num_runs, job.hidden_size, job.intermediate_size
    base = phases.mlp_norm(here, num_tokens, base)
    if num_runs:
        base = phases.shrink_gate_up(here, num_runs, base)
    base = phases.gate_up(here, num_pieces(job, size, hidden_size), base)
    if num_runs:
        base = phases.shrink_down(here, num_runs, base)
    if layer.down_kind:
        base = phases.quantise_gated(here, num_tokens, base)
    return phases.down(here, num_pieces(job, hidden_size, size), base)


@inner
def _outputs(here: Here, base: int) -> None:
    """The hidden states and the logits that are wanted."""
    job = here.job
    if job.num_hidden:
        base = phases.hidden_norm(here, job.num_hidden, base)
    base = phases.final_norm(here, job.num_outputs, base)
    phases.head(here, num_pieces(job, job.vocab_size, job.hidden_size), base)


@export(types.void(*[types.int64] * 5))
def step(job_at: int, layers: int, items: int, runs: int, thread: int) -> None:
    """A thread's share of the step that a job describes."""
    job = _job_at(job_at, 0)
    here = Here(job, _layer_at(layers, 0), items, runs, job.scratch + thread * job.scratch_stride)
    base = phases.embed(here, job.num_tokens, job.claims)
    if job.num_embeds:
        base = phases.place_embeds(here, job.num_embeds, base)
    for i in range(job.num_layers):
        here = Here(job, _layer_at(layers, i), items, runs, here.scratch)
        base = _attention(here, base)
        base = _mlp(here, base)
    _outputs(here, base)


@export(types.void(*[types.int64] * 6))
def part(job_at: int, layers: int, items: int, runs: int, number: int, thread: int) -> None:
    """A thread's share of a part of a step: of the halves of layers in their order, behind which come the outputs."""
    job = _job_at(job_at, 0)
    layer = min(number // 2, job.num_layers - 1)
    here = Here(job, _layer_at(layers, layer), items, runs, job.scratch + thread * job.scratch_stride)
    if number == 2 * job.num_layers:
        _outputs(here, job.claims)
    elif number % 2:
        _mlp(here, job.claims)
    else:
        _attention(here, job.claims)


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
