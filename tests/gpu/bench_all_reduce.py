"""Times the all-reduces of ranks: `python3 -m tests.gpu.bench_all_reduce [ranks]`. With fewer GPUs than ranks they
share one, which WEFT_TEST_SHARED_GPU=1 must allow; then their kernels wait for each other's time slices, unless CUDA's
MPS runs."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback

import torch
from torch import Tensor

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
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
