"""What it costs the CPU to launch a step that is not captured: many decodes and some prompts.

`python3 -m tests.gpu.bench_launching DIR [quantization]`, where DIR holds the config.json of a model. On a machine with
a GPU it says how long launching takes, and the whole step. On any other one that has Triton kernels launch nothing, and
what is left is what Python, torch and Triton do before they would: without the library's matrix products, so it tells
most of the formats that do without.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import triton
from triton.runtime.jit import JITFunction

from weft.hub.resolve import find_model
from weft.kernels.triton.launch import _NoDevice
from weft.model.loader import open_model
from weft.options import BackendOptions, CacheOptions, Config, ModelOptions
from weft.plan import Limits, Row
from weft.worker.compile_ahead import FutureSteps
from weft.worker.forward_step import Stepper
from weft.worker.inputs import StepInputs, exact_shape, section_sizes, views
from weft.worker.worker import Worker

DECODES, PROMPTS, PROMPT_TOKENS, CONTEXT = 200, 6, 512, 600
RUNS = 60


class NoKernel:
    """A compiled kernel that does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None: ...

    def run(self, *_: object) -> None:
        NoKernel.launches += 1

    launches = 0


def without_gpu(config: Config) -> Stepper:
    """Return a stepper whose tensors have no memory, and whose kernels are never compiled."""

    def compiled(self: JITFunction, key: str, signature: object, device: int, *_: object) -> NoKernel:
        self.device_caches[device][0][key] = NoKernel()
        return self.device_caches[device][0][key]

    JITFunction._do_compile = compiled
    triton.runtime.driver.set_active(_NoDevice((9, 0)))
    with open_model(find_model(config)) as (geometry, _):
        limits = Limits(
            num_blocks=10, block_size=16, max_model_len=geometry.max_position, max_num_seqs=256,
            max_num_batched_tokens=8192, max_prefill_chunk=4096, max_mixed_prefill=384,
            logits_width=geometry.vocab_size,
        )  # fmt: skip
    linears = config.backend.quantization or "dequantise"
    steps = FutureSteps(geometry, torch.bfloat16, torch.bfloat16, linears, False, limits, 256)
    return steps.stepper(geometry.num_layers)


def measured(launch: Callable[[], object], wait: Callable[[], None]) -> tuple[float, float]:
    """Return the least milliseconds until a step was launched, to which a busy machine adds, and until it ended."""
    launching, whole = [], []
    for number in range(RUNS):
        began = time.perf_counter()
        launch()
        launched = time.perf_counter()
        wait()
        if number > 2:
            launching.append(1000 * (launched - began))
            whole.append(1000 * (time.perf_counter() - began))
    return min(launching), min(whole)


def main() -> None:
    folder, quantization = [*sys.argv[1:], *("", "")[len(sys.argv) - 1 :]]
    has_gpu = torch.cuda.is_available()
    config = Config(
        model=ModelOptions(
            model=folder, load_format="dummy", device="cuda" if has_gpu else "cpu", dtype="bfloat16", image_model="none"
        ),
        backend=BackendOptions(quantization=quantization),
        cache=CacheOptions(kv_cache_memory_mb=40_000),
    )
    stepper = Worker(config, find_model(config)).runner.stepper if has_gpu else without_gpu(config)
    rows = [Row(0, CONTEXT, 1, [], True)] * DECODES + [Row(0, 0, PROMPT_TOKENS, [], True)] * PROMPTS
    shape = exact_shape(rows)
    inputs: StepInputs = views(
        torch.zeros(sum(section_sizes(shape)), dtype=torch.int64, device=stepper.table.device), shape
    )
    launching, whole = measured(
        lambda: stepper.step(shape, inputs, CONTEXT + 1), torch.cuda.synchronize if has_gpu else lambda: None
    )
    tokens = DECODES + PROMPTS * PROMPT_TOKENS
    launches = "" if has_gpu else f" by {NoKernel.launches // RUNS} kernels"
    print(f"{quantization or 'bfloat16'}, {tokens} tokens: launching {launching:.1f} ms{launches}", end="")
    print(f", all of it {whole:.1f} ms" if has_gpu else "")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
