"""Times the all-reduces of ranks: `python3 -m tests.gpu.bench_all_reduce ranks|streams [N]`. With fewer GPUs than
ranks they share one, which WEFT_TEST_SHARED_GPU=1 must allow; then their kernels wait for each other's time slices,
unless CUDA's MPS runs."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback

import torch
from torch import Tensor

from weft.kernels.triton.all_reduce import OneShot, inbox_bytes
from weft.kernels.triton.launch import overlapping_launches
from weft.worker.tensor_parallel import LOOPBACK, RankGroup, rank_device

HIDDEN = 4096
ROWS = (1, 8, 32, 64)
NUM_OPS = 60
"""All-reduces of a captured step."""


def check(group: RankGroup, device: torch.device) -> None:
    """Compare sums with those of float32, and their bits among the ranks."""
    size, rank = group.shard.size, group.shard.rank
    for count, dtype in (
        (1, torch.float32),
        (777, torch.bfloat16),
        (4096, torch.bfloat16),
        (64 * 4096, torch.bfloat16),
    ):
        for number in range(5):
            parts = [
                torch.randn(count, generator=torch.Generator().manual_seed(100 * number + one)).to(dtype)
                for one in range(size + 1)
            ]
            residual, own = parts[size].to(device), parts[rank].to(device)
            group.all_reduce(own, residual)
            expected = sum((part.float() for part in parts), torch.zeros(count))
            torch.testing.assert_close(residual.float().cpu(), expected, atol=4e-2, rtol=1e-2)
            bits = residual.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).long()
            sums = [int(bits.sum()), -int(bits.sum())]
            least = group.least(device, *sums)
            assert least[0] == -least[1], f"ranks differ in the sum of {count} numbers"


def microseconds(group: RankGroup, x: Tensor, residual: Tensor) -> float:
    """Return what an all-reduce takes among those of a captured step."""

    def step() -> None:
        for _ in range(NUM_OPS):
            group.all_reduce(x, residual)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    torch.cuda.synchronize()
    taken = []
    began = time.perf_counter()
    while len(taken) < 10:
        group.least(x.device, 0)
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        (go_on,) = group.least(x.device, int(time.perf_counter() - began < 1.5))
        taken.append(start.elapsed_time(end) * 1000 / NUM_OPS)
        if not go_on:
            break
    return sorted(taken)[len(taken) // 2]


@torch.inference_mode()
def measure(group: RankGroup) -> None:
    device = rank_device(torch.device("cuda"), group.shard)
    group.connect(device, 60)
    is_first = group.shard.rank == 0
    check(group, device)
    one_shot = group._one_shot
    if is_first:
        print(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}; {torch.cuda.get_device_name()}; {one_shot=}")
    for rows in ROWS:
        found = []
        for kind in (one_shot, None):
            group._one_shot = kind
            x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=device)
            found.append(microseconds(group, x, torch.zeros_like(x)))
        if is_first:
            print(
                f"{rows:4} rows of {HIDDEN}, bfloat16: one-shot {found[0]:8.1f} us, NCCL {found[1]:8.1f} us", flush=True
            )
    os._exit(0)


@torch.inference_mode()
def measure_streams(size: int) -> None:
    """Print what the one-shot all-reduce takes among ranks that are streams of one process, through the memory of one
    GPU."""
    inboxes = torch.zeros(size, inbox_bytes(size) // 8, dtype=torch.int64, device="cuda")
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device="cuda")
    ranks = [OneShot(rank, addresses) for rank in range(size)]
    streams = [torch.cuda.Stream() for _ in range(size)]
    # The programs of all ranks must be on the GPU at once, those that start early too.
    for rows in (rows for rows in ROWS if rows * size <= 128):
        x = torch.zeros(size, rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
        residuals = torch.zeros_like(x)

        def step(num_ops: int, x: Tensor = x, residuals: Tensor = residuals) -> None:
            for one, stream, part, residual in zip(ranks, streams, x, residuals, strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(num_ops):
                        one.all_reduce(part, residual)
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)

        taken = []
        for num_ops in (NUM_OPS, 2 * NUM_OPS):
            with overlapping_launches():
                step(1)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step(num_ops)
            taken.append(replay_ms(graph))
        print(f"{rows:4} rows: one-shot of {size} streams {(taken[1] - taken[0]) * 1000 / NUM_OPS:8.2f} us", flush=True)


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    taken = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return sorted(taken)[len(taken) // 2]


def main(size: int) -> None:
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            try:
                measure(RankGroup(rank, size, port, listener=listener if rank == 0 else None))
            except BaseException:  # nothing may return into the first process
                traceback.print_exc()
            finally:
                os._exit(1)
        pids.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))


if __name__ == "__main__":
    chosen = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    measure_streams(chosen) if "streams" in sys.argv else main(chosen)
