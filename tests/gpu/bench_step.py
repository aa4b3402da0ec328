"""What each op of a decode step costs: a captured step is timed with all of them, and with one left out at a time.

`python3 -m tests.gpu.bench_step DIR [quantization] [rows,rows,...]`, where DIR holds the config.json of a model; its weights
are random. Launches overlap, so a kernel by itself says little of what it adds to a step.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from weft.hub.resolve import find_model
from weft.kernels import Ops
from weft.kernels.weights import Weight
from weft.model.dense import DenseModel
from weft.options import BackendOptions, CacheOptions, Config, ModelOptions
from weft.worker.forward_step import Stepper
from weft.worker.graphs import StepGraphs
from weft.worker.inputs import StepShape, views
from weft.worker.worker import Worker

CONTEXT = 200


def without(ops: Ops, rows: int, hidden: int) -> dict[str, Ops]:
    """Return tables of ops with one that computes nothing; linear layers are told apart by their shapes."""
    outputs = torch.zeros(rows, 1 << 17, dtype=torch.bfloat16, device="cuda")

    def skipped_add(is_skipped: Callable[[Weight], bool]) -> Callable[..., None]:
        def add(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> None:
            if not is_skipped(weight):
                ops.linear_add(x, weight, bias, residual)

        return add

    return {
        "all of it": ops,
        "qkv": ops._replace(norm_linear=lambda x, norm, eps, weight, bias: outputs[:, : weight.shape[0]]),
        "rotate and store": ops._replace(rotate_and_store=lambda *_: None),
        "attention": ops._replace(attention=lambda qkv, heads, kv, batch: outputs[:, : heads.q_size]),
        "output": ops._replace(linear_add=skipped_add(lambda weight: weight.shape[1] == hidden)),
        "gate and up": ops._replace(norm_gate_up=lambda x, norm, eps, weight: outputs[:, : weight.shape[0] // 2]),
        "down": ops._replace(linear_add=skipped_add(lambda weight: weight.shape[1] != hidden)),
        "head": ops._replace(linear=lambda x, weight, bias: outputs[:, : weight.shape[0]]),
        "greedy": ops._replace(greedy=lambda logits: (logits[:, 0].long(), logits[:, 0].float())),
    }


def milliseconds(stepper: Stepper, rows: int) -> float:
    graphs = StepGraphs(stepper, rows, with_prefills=False)
    shape = StepShape(rows, 0, 0, rows)
    captured = graphs._capture(shape)
    inputs = views(captured.inputs, shape)
    for numbers in (inputs.token_rows, inputs.sequence_rows, inputs.sample_rows):
        numbers.copy_(torch.arange(rows))
    for positions in (inputs.positions, inputs.sample_positions):
        positions.fill_(CONTEXT - 1)
    inputs.lengths.fill_(CONTEXT)
    times = []
    for _ in range(5):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(20):
            captured.graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 20)
    return statistics.median(times)


def main() -> None:
    folder, quantization, sizes = (*sys.argv[1:], "", "1")[:3] if len(sys.argv) < 4 else sys.argv[1:4]
    config = Config(
        model=ModelOptions(model=folder, load_format="dummy", device="cuda", dtype="bfloat16", image_model="none"),
        backend=BackendOptions(quantization=quantization),
        cache=CacheOptions(kv_cache_memory_mb=40_000),
    )
    stepper = Worker(config, find_model(config)).runner.stepper
    model, table = stepper.model, stepper.table
    blocks = -(-CONTEXT // table.block_size)
    table.blocks[:256, :blocks] = torch.arange(1, 1 + 256 * blocks, device="cuda").view(256, blocks)
    table.tokens[:256] = torch.randint(10, 10_000, table.tokens[:256].shape, device="cuda")
    for rows in map(int, sizes.split(",")):
        whole = 0.0
        for name, ops in without(model.ops, rows, model.config.hidden_size).items():
            one = Stepper(
                DenseModel(model.config, model.weights, ops, table.tokens.shape[1]), stepper.kv_cache, table
            )
            took = milliseconds(one, rows)
            whole = whole or took
            each = "" if took == whole else f"{1000 * (whole - took) / model.config.num_layers:8.2f} us a layer"
            print(f"{quantization or 'bfloat16'} rows {rows:4d} {name:18} {took:8.3f} ms {each}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
