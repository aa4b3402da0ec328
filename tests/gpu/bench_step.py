"""What each op of a decode step costs: a captured step is timed with all of them, and with one left out at a time.

`python3 -m tests.gpu.bench_step DIR [quantization] [rows,rows,...] [adapters]`, where DIR holds the config.json of a
model; its weights are random. The quantization may be a block format of GGUF, of `bench_kernels.KINDS`. With adapters,
of rank 16 and shared out over the rows, it times what their ops add.
Launches overlap, so a kernel by itself says little of what it adds to a step.
"""

from __future__ import annotations

import statistics
import sys

import torch
from torch import Tensor

from tests.gpu.bench_kernels import KINDS
from weft.hub.resolve import find_model
from weft.kernels import Ops
from weft.kernels.batch import AdapterGroups
from weft.kernels.int_weights import pack
from weft.kernels.kv_cache import numbers_in
from weft.kernels.triton.elementwise import silu_mul
from weft.kernels.weights import SlotLowRank
from weft.model.dense import DenseModel
from weft.model.dense_lora import AdapterSlots
from weft.model.loader import _Loading
from weft.options import BackendOptions, CacheOptions, Config, ModelOptions
from weft.worker.forward_step import Stepper
from weft.worker.graphs import StepGraphs
from weft.worker.inputs import StepShape, views
from weft.worker.worker import Worker

CONTEXT = 200


def without(ops: Ops, rows: int) -> dict[str, Ops]:
    """Return tables of ops with one that computes nothing. Without a half of the MLP, what the halves share is with the
    other one."""
    outputs = torch.zeros(rows, 1 << 17, dtype=torch.bfloat16, device="cuda")

    return {
        "all of it": ops,
        "qkv": ops._replace(norm_linear=lambda x, norm, eps, weight, bias: outputs[:, : weight.shape[0]]),
        "rotate and store": ops._replace(rotate_and_store=lambda *_: None),
        "attention": ops._replace(attention=lambda qkv, heads, kv, batch: outputs[:, : heads.q_size]),
        "output": ops._replace(linear_add=lambda *_: None),
        "gate and up": ops._replace(
            norm_gate_up=lambda x, norm, eps, weight: outputs[:, : weight.shape[0] // 2]
        ).with_mlp_in_parts(),
        "down": ops._replace(add_mlp=lambda *layer: ops.norm_gate_up(*layer[:4])),
        "head": ops._replace(linear=lambda x, weight, bias: outputs[:, : weight.shape[0]]),
        "greedy": ops._replace(greedy=lambda logits: (logits[:, 0].long(), logits[:, 0].float())),
    }


def without_lora(ops: Ops) -> dict[str, Ops]:
    """Return tables of ops with one of the low-rank products that computes nothing."""

    def unshrunk(x: Tensor, weight: SlotLowRank, groups: AdapterGroups) -> Tensor:
        return torch.empty(1, len(x), weight.shrink.shape[1], device="cuda")

    def unadapted(gate_up: Tensor, ranks: Tensor, weight: SlotLowRank, groups: AdapterGroups) -> Tensor:
        return silu_mul(gate_up)

    return {
        "all of it": ops,
        "lora shrink": ops._replace(lora_shrink=unshrunk),
        "lora expand add": ops._replace(lora_expand_add=lambda *_: None),
        "lora expand gate": ops._replace(lora_expand_gate=unadapted),
    }


def milliseconds(stepper: Stepper, rows: int, slots: AdapterSlots | None = None) -> float:
    graphs = StepGraphs(stepper, rows, with_prefills=False, slots=slots)
    shape = StepShape(rows, 0, 0, rows, slots.count if slots is not None else 0)
    captured = graphs._capture(shape)
    inputs = views(captured.inputs, shape)
    if slots is not None:
        ends = torch.arange(1, slots.count + 1) * rows // slots.count
        inputs.slot_starts.copy_(torch.cat([torch.zeros(2, dtype=torch.int64), ends]))
    for numbers in (inputs.token_rows, inputs.sequence_rows, inputs.sample_rows):
        numbers.copy_(torch.arange(rows))
    inputs.positions.fill_(CONTEXT - 1)
    for ends in (inputs.lengths, inputs.sample_ends):
        ends.fill_(CONTEXT)
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
    folder, quantization, sizes, adapters = [*sys.argv[1:], *("", "", "1", "0")[len(sys.argv) - 1 :]]
    is_block = quantization.startswith("Q")
    if is_block:
        _Loading.int8_weight = lambda self, weight: pack(KINDS[quantization](weight), self.dtype)
    config = Config(
        model=ModelOptions(model=folder, load_format="dummy", device="cuda", dtype="bfloat16", image_model="none"),
        backend=BackendOptions(quantization="int8" if is_block else quantization),
        cache=CacheOptions(kv_cache_memory_mb=40_000),
    )
    runner = Worker(config, find_model(config)).runner
    # Until all kernels are compiled others stand in for some.
    if runner.graphs is not None and not runner.graphs._is_compiled(600.0):
        sys.exit("The kernels were not compiled within ten minutes.")
    stepper = runner.stepper
    model, table = stepper.model, stepper.table
    blocks = -(-CONTEXT // table.block_size)
    table.blocks[:256, :blocks] = torch.arange(1, 1 + 256 * blocks, device="cuda").view(256, blocks)
    for kv in stepper.kv_cache:
        # To read zeros takes less power, and a whole step is at its limit.
        numbers_in(kv)[: 1 + 256 * blocks].normal_()
    table.tokens[:256] = torch.randint(10, 10_000, table.tokens[:256].shape, device="cuda")
    slots = AdapterSlots(model, int(adapters), 16) if int(adapters) else None
    for rows in map(int, sizes.split(",")):
        whole = 0.0
        if slots is not None:
            print(
                f"{quantization or 'bfloat16'} rows {rows:4d} without adapters   {milliseconds(stepper, rows):8.3f} ms"
            )
        tables = without_lora(model.ops) if slots is not None else without(model.ops, rows)
        for name, ops in tables.items():
            one = Stepper(DenseModel(model.config, model.weights, ops, table.tokens.shape[1]), stepper.kv_cache, table)
            took = milliseconds(one, rows, slots)
            whole = whole or took
            each = "" if took == whole else f"{1000 * (whole - took) / model.config.num_layers:8.2f} us a layer"
            print(f"{quantization or 'bfloat16'} rows {rows:4d} {name:18} {took:8.3f} ms {each}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
