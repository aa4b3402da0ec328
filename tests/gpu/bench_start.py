"""Where the seconds of a start go, in the engine process: `python3 -m tests.gpu.bench_start DIR [quantization]`.

DIR holds a model, or the config.json of one: then its weights are random. The kernels are those of the folder that
WEFT_COMPILE_CACHE names: with an empty one all are compiled. It prints what each part took, which kernels were
compiled and how long each took, and every piece of preparation after the start.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()


def note(text: str) -> None:
    print(f"{time.perf_counter() - BEGAN:8.3f} s  {text}", flush=True)


def timed(owner: Any, name: str) -> None:
    """Tell how long each call of a function takes."""
    function: Callable[..., Any] = getattr(owner, name)

    @wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            note(f"{name}: {time.perf_counter() - began:.3f} s")

    setattr(owner, name, wrapped)


def main(folder: str, quantization: str = "") -> None:
    from weft.compile_cache import compile_cache_environment

    os.environ |= compile_cache_environment()
    from weft.engine.fork_server import DeferredImports

    DeferredImports().import_torch()
    import torch

    note("torch is imported")
    import weft.engine.loop  # noqa: F401

    note("the engine's modules are imported")
    import triton  # type: ignore[import-not-found]

    note("triton is imported")
    compiled: list[tuple[float, str]] = []

    def listen(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        seconds = (times.ir_initialization + sum(stage[1] for stage in times.lowering_stages)) / 1e6
        what = f"{src.fn.__name__} {seconds:.2f} s" + (" from the cache" if cache_hit else "")
        constants = " ".join(f"{key}={value}" for key, value in sorted((str(k), v) for k, v in src.constants.items()))
        compiled.append((0.0 if cache_hit else seconds, f"{what}: {constants}"))

    triton.knobs.compilation.listener = listen
    from weft.hub.resolve import find_model
    from weft.options import BackendOptions, Config, ModelOptions
    from weft.worker import memory_profile, worker
    from weft.worker.compile_ahead import CompileAhead
    from weft.worker.runner import Runner

    is_dummy = not any(Path(folder).glob("*.safetensors"))
    config = Config(
        model=ModelOptions(model=folder, device="cuda", load_format="dummy" if is_dummy else "auto"),
        backend=BackendOptions(quantization=quantization),
    )
    files = find_model(config)
    torch.empty(1, device="cuda")
    note("CUDA is initialised")
    owners = {
        worker: ("load_weights", "measured", "_stepper", "StepGraphs"),
        CompileAhead: ("__init__", "wait_for_largest", "wait_for_eager"),
        Runner: ("prepare",),
        memory_profile: ("compute",),
    }
    for owner, name in [(owner, name) for owner, names in owners.items() for name in names]:
        timed(owner, name)
    made = worker.Worker(config, files)
    Runner.prepare = Runner.prepare.__wrapped__  # type: ignore[attr-defined,method-assign]
    note(f"the worker is made; {len(compiled)} kernels, {sum(one[0] for one in compiled):.1f} s to compile")
    slowest: list[tuple[float, int, int]] = []
    number, going = 0, True
    while going:
        began, before = time.perf_counter(), len(compiled)
        going = made.runner.prepare()
        torch.cuda.synchronize()
        slowest.append((time.perf_counter() - began, number, len(compiled) - before))
        number += 1
    fresh = [one for one in compiled if one[0]]
    note(f"all is prepared; {len(compiled)} kernels, {len(fresh)} compiled in {sum(one[0] for one in fresh):.1f} s")
    print("pieces: " + " ".join(f"{1000 * one[0]:.0f}/{one[2]}" for one in slowest))
    for seconds, text in compiled:
        if seconds:
            print(f"  {text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
