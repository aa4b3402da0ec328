"""Kernels are known before they are launched, and compiled by several processes."""

from __future__ import annotations

import os
import random
import select
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from tests.waiting import wait_until
from weft.kernels.fp8 import E4M3
from weft.model.dense import DenseConfig
from weft.model.dense_lora import AdapterSlots
from weft.model.loader import LinearLoading
from weft.model.shard import WHOLE, Shard
from weft.plan import Limits, Row
from weft.worker import compile_ahead
from weft.worker.compile_ahead import CompileAhead, FutureSteps, computed, in_processes
from weft.worker.inputs import exact_shape

GEOMETRY = DenseConfig(
    family="llama", hidden_size=256, num_layers=30, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=512,
    vocab_size=1000, max_position=4096, norm_eps=1e-6, rope_theta=10000.0,
)  # fmt: skip
LIMITS = Limits(
    num_blocks=10, block_size=16, max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=8192,
    max_prefill_chunk=2048, max_mixed_prefill=384, logits_width=1000,
)  # fmt: skip


def test_every_task_is_done_once_by_one_of_several_processes(tmp_path: Path) -> None:
    def leave(number: int) -> None:
        with (tmp_path / str(number)).open("x") as file:
            file.write(str(os.getpid()))

    tasks = [partial(leave, number) for number in range(300)]
    pipes = [os.pipe() for _ in range(2)]
    in_processes([tasks[:100], tasks[100:]], [ours for _, ours in pipes], 3)
    assert [os.read(told, 1) for told, _ in pipes] == [b"", b""]
    done = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert done.keys() == {str(number) for number in range(300)}
    assert str(os.getpid()) not in done.values()
    assert 1 <= len(set(done.values())) <= 3


def test_the_end_of_a_group_is_told_while_the_next_one_goes_on(tmp_path: Path) -> None:
    pipes = [os.pipe() for _ in range(2)]

    def block() -> None:
        wait_until((tmp_path / "released").exists)

    groups = [[(tmp_path / str(number)).touch for number in range(20)], [block] * 5]
    running = threading.Thread(target=in_processes, args=(groups, [ours for _, ours in pipes], 3))
    running.start()
    (first, _), (second, _) = pipes
    assert os.read(first, 1) == b""
    assert len(list(tmp_path.iterdir())) == 20
    assert not select.select([second], [], [], 0)[0]
    (tmp_path / "released").touch()
    assert os.read(second, 1) == b""
    running.join()


def test_later_groups_leave_the_cores_to_others(tmp_path: Path) -> None:
    def note(name: str) -> None:
        (tmp_path / name).write_text(str(os.nice(0)))

    own = os.nice(0)
    least = min(19, own + compile_ahead.NICENESS)
    in_processes([[partial(note, "first")], [partial(note, "second")]], [os.pipe()[1] for _ in range(2)], 1)
    assert [(tmp_path / name).read_text() for name in ("first", "second")] == [str(own), str(least)]


def test_a_task_that_fails_is_told_and_the_others_are_done(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("no compiler")

    tasks = [fail, *((tmp_path / str(number)).touch for number in range(20))]
    _, ours = os.pipe()
    with pytest.raises(ChildProcessError, match="1 of 2"):
        in_processes([tasks], [ours], 2)
    assert len(list(tmp_path.iterdir())) == 20


@pytest.mark.parametrize("exit_code", [0, 1])
def test_an_engine_is_ready_before_captured_steps_are_compiled(
    exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    awaits: list[bool] = []

    def compile_little(steps: object, capability: object, largest: int, eager: int, captured: int) -> None:
        os.close(largest)
        os.close(eager)
        wait_until((tmp_path / "released").exists)
        os._exit(exit_code)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "has_triton", lambda: True)
    monkeypatch.setattr(compile_ahead, "_compile", compile_little)
    monkeypatch.setattr(compile_ahead, "_await_slow_kernels", awaits.append)
    hashing = threading.Thread()
    hashing.start()
    compiling = CompileAhead([], (9, 0), hashing)
    compiling.wait_for_largest()
    compiling.wait_for_eager()
    assert not compiling.is_done()
    assert awaits == [True]
    assert not list(tmp_path.glob("weft-*"))
    (tmp_path / "released").touch()
    compiling.wait()
    assert compiling.is_done()
    assert awaits == [True, False]
    assert len(list(tmp_path.glob("weft-*"))) == 1 - exit_code


@pytest.mark.parametrize(
    ("linears", "kv_dtype", "shard", "expected"),
    [
        ("dequantise", torch.bfloat16, WHOLE, {"_prefill_kernel", "_decode_kernel", "_skinny_kernel", "_gemv_kernel"}),
        ("dequantise", E4M3, WHOLE, {"_prefill_kernel", "_decode_fp8_kernel"}),
        ("dequantise", torch.bfloat16, Shard(0, 2), {"_decode_kernel", "_skinny_kernel", "_one_shot_kernel"}),
        ("fp8", torch.bfloat16, WHOLE, {"_tiled_kernel", "_quantise_kernel", "_quantise_gated_kernel", "_wide_kernel"}),
        ("int4", torch.bfloat16, WHOLE, {"_int_kernel"}),
        (
            "w4a8",
            torch.bfloat16,
            WHOLE,
            {"_int_kernel", "_dequantise_kernel", "_quantise_gated_kernel", "_tiled_kernel", "_rotate_kernel"},
        ),
        ("w4a8", torch.bfloat16, WHOLE, {"_w4a8_kernel", "_block_rows_kernel"}),
    ],
)
def test_the_kernels_of_steps_are_found_without_a_gpu(
    linears: LinearLoading, kv_dtype: torch.dtype, shard: Shard, expected: set[str]
) -> None:
    pytest.importorskip("triton")
    from weft.kernels.triton.launch import recorded_launches

    steps = FutureSteps(GEOMETRY, torch.bfloat16, kv_dtype, linears, linears == "dequantise", LIMITS, 64, shard=shard)
    with recorded_launches((9, 0)) as launches, torch.inference_mode():
        steps.compute()
        steps.compute_captured()
    assert expected | {"_norm_kernel", "_threshold_kernel", "_row_kernel"} <= {one.kernel.__name__ for one in launches}
    assert len(set(launches)) == len(launches)
    # Numbers are unpacked as a GPU does it, not as the interpreter.
    unpacking = [one for one in launches if one.kernel.__name__ in ("_int_kernel", "_dequantise_kernel")]
    assert all("lop3.b32" in one.specialisation for one in unpacking)
    of_bytes = [one for one in launches if one.kernel.__name__ == "_w4a8_kernel"]
    assert all("0x0F0F0F0F" in one.specialisation for one in of_bytes)


def test_another_kernel_stands_in_for_one_that_takes_long_to_compile() -> None:
    pytest.importorskip("triton")
    from weft.kernels.triton.launch import await_slow_kernels, recorded_launches

    geometry = replace(GEOMETRY, head_dim=128)
    steps = FutureSteps(geometry, torch.bfloat16, torch.bfloat16, "dequantise", True, LIMITS, 64)
    names = []
    for awaits in (True, False):
        await_slow_kernels(awaits)
        with recorded_launches((9, 0)) as launches, torch.inference_mode():
            steps.compute()
        names.append({one.kernel.__name__ for one in launches})
    assert "_prefill_kernel" in names[0]
    assert names[1] == names[0] | {"_wide_prefill_kernel"}


@pytest.mark.parametrize("max_num_seqs", [100, 256])
@pytest.mark.parametrize("linears", ["dequantise", "fp8", "int4", "w4a8"])
@pytest.mark.parametrize("num_kv_heads", [8, 32])
def test_steps_of_any_size_launch_nothing_that_was_not_foreseen(
    linears: LinearLoading, num_kv_heads: int, max_num_seqs: int
) -> None:
    pytest.importorskip("triton")
    from weft.kernels.triton.launch import recorded_launches

    # Kernels choose their tiling by the size of the model.
    geometry = replace(
        GEOMETRY, hidden_size=4096, num_heads=32, num_kv_heads=num_kv_heads, head_dim=128, intermediate_size=14336,
        vocab_size=100_000,
    )  # fmt: skip
    limits = replace(LIMITS, max_num_seqs=max_num_seqs, logits_width=100_000)
    steps = FutureSteps(
        geometry,
        torch.bfloat16,
        torch.bfloat16,
        linears,
        linears == "dequantise",
        limits,
        64,
        num_slots=4,
        slot_rank=16,
    )
    chance = random.Random(7)
    with recorded_launches((9, 0)) as foreseen, torch.inference_mode():
        steps.compute()
    is_streamed = linears in ("dequantise", "fp8")
    assert ("_streamed_gemv_kernel" in {one.kernel.__name__ for one in foreseen}) == is_streamed
    with recorded_launches((9, 0)) as launches, torch.inference_mode():
        stepper = steps.stepper()
        slots = AdapterSlots(stepper.model, 4, 16)
        for _ in range(60):
            decodes = [1] * chance.choice([0, chance.randint(1, 64), chance.randint(1, max_num_seqs)])
            prompts = [chance.choice([16, 500, 2048, chance.randint(2, 2048)]) for _ in range(chance.randint(0, 4))]
            rows = [Row(0, chance.randint(0, 1000), count, [], True) for count in decodes + prompts]
            if rows:
                longest = max(row.start + row.count for row in rows)
                computed(stepper, exact_shape(rows), longest, chance.choice([None, slots]))
    assert {*launches} <= {*foreseen}
