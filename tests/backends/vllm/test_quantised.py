"""vLLM with weights that are really quantised: it answers as the native engine does with the numbers they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.backends.vllm.real import ask, config_of, eager, needs_any_vllm
from tests.quantised_models import save_quantised, unquantised
from weft.backends.blocking import BlockingEngine
from weft.backends.failover import start_engine
from weft.backends.native import start_native
from weft.machine.devices import accelerator
from weft.types import SamplingParams

pytestmark = needs_any_vllm

PROMPT = list(range(20, 60))
SCORED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=20)
CLOSE = {"gptq": 0.1, "awq": 0.1, "fp8": 0.25}
"""Of log probabilities: vLLM rounds activations to 16 bits, for FP8 to 8 of which three are the mantissa."""


ENGINE = "cuda-vllm" if accelerator() == "cuda" else "cpu-vllm"
NEEDS_AMX = pytest.mark.skipif(
    ENGINE == "cpu-vllm" and not torch.cpu._is_amx_tile_supported(), reason="vLLM computes FP8 on CPUs with AMX"
)


@pytest.mark.parametrize("method", ["gptq", "awq", pytest.param("fp8", marks=NEEDS_AMX)])
def test_quantised_weights(method: str, vllm_model: Path, tmp_path: Path) -> None:
    quantised = save_quantised(vllm_model, tmp_path / "quantised", method)
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in vllm_model.iterdir():
        (plain / file.name).write_bytes(file.read_bytes())
    weights = load_file(plain / "model.safetensors")
    same = {n: unquantised(w.float(), method) if n.endswith("_proj.weight") else w for n, w in weights.items()}
    save_file(same, plain / "model.safetensors", metadata={"format": "pt"})
    with BlockingEngine(lambda: start_native(config_of(plain, device="cpu", threads=1))) as native:
        expected = ask(native, PROMPT, SCORED)
    restore = eager()
    try:
        config = config_of(quantised, engine=ENGINE, quantization=method)
        with BlockingEngine(lambda: start_engine(config)) as vllm:
            given = ask(vllm, PROMPT, SCORED)
    finally:
        restore()
    ours, theirs = dict(expected.logprobs[0].top), dict(given.logprobs[0].top)
    common = ours.keys() & theirs.keys()
    assert given.token_ids[0] in common and expected.token_ids[0] in common
    assert len(common) > len(ours) / 2
    assert [theirs[token] for token in common] == pytest.approx([ours[token] for token in common], abs=CLOSE[method])
