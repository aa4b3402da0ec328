"""Weights in panels, and the native products with them, against torch."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from tests.kernels.steps import MAX_MODEL_LEN, Step, config, random_cache, random_step, random_weights
from tests.worker import driving
from weft.hub.resolve import resolve
from weft.kernels import REFERENCE
from weft.kernels.cpu import panel_layout
from weft.kernels.cpu.compiled import FEATURES
from weft.kernels.cpu.fused_step import FusedStep
from weft.kernels.panel_format import FORMATS, PanelFormat, PanelLayout, format_for
from weft.kernels.quantised import QuantisedWeight, pack, rounded
from weft.kernels.weights import DecoderWeights
from weft.model.dense import DenseConfig, DenseModel
from weft.options import BackendOptions, CacheOptions, Config, ModelOptions
from weft.worker.worker import Worker

LAYOUT = panel_layout() or PanelLayout(4)
SIZES = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 211, "num_heads": 4, "num_kv_heads": 2}
"""Whole blocks, and whole panels of every width but for the vocabulary."""
LINEARS = ("qkv", "output", "gate_up", "down")


def quantised(weight: Tensor, wanted: PanelFormat, layout: PanelLayout = LAYOUT) -> QuantisedWeight:
    """The nearest weight of a format, with every group between its least and its greatest number."""
    groups = weight.unflatten(-1, (-1, wanted.group_size))
    least, most = groups.amin(-1), groups.amax(-1)
    scales = ((most - least) / (2**wanted.bits - 1)).half().float().clamp_min(1e-7)
    # The minima of numbers above 127 are 128 scales below 0, as those of Q8_0.
    minima = -128 * scales if wanted.bits == 8 else least.half().float()
    numbers = ((groups - minima.unsqueeze(-1)) / scales.unsqueeze(-1)).round().clamp(0, 2**wanted.bits - 1)
    return pack(numbers.flatten(-2).to(torch.uint8), scales, minima, wanted, layout)


@pytest.mark.parametrize("wanted", FORMATS)
@pytest.mark.parametrize("layout", [PanelLayout(lanes, signed) for lanes in (4, 8, 16) for signed in (False, True)])
def test_what_is_packed_comes_out_again(wanted: PanelFormat, layout: PanelLayout) -> None:
    numbers = torch.randint(0, 2**wanted.bits, (45, 96), dtype=torch.uint8)
    scales = torch.rand(45, 96 // wanted.group_size).half().float()
    minima = -(2.0 ** (wanted.bits - 1)) * scales
    packed = pack(numbers, scales, minima, wanted, layout)
    whole = numbers.unflatten(1, (-1, wanted.group_size)) * scales.unsqueeze(2) + minima.unsqueeze(2)
    assert packed.shape == (45, 96) and torch.equal(packed.dequantised(), whole.flatten(1))
    at = torch.tensor([44, 0, 13, 13])
    assert torch.equal(packed.rows(at), whole.flatten(1)[at])
    assert packed.panels.numel() == 48 * 3 * wanted.bytes_per_row


@pytest.mark.parametrize("wanted", FORMATS)
def test_numbers_in_pairs_are_packed_as_others_are(wanted: PanelFormat) -> None:
    numbers = torch.randint(0, 16, (21, 96), dtype=torch.uint8)
    scales = torch.rand(21, 96 // wanted.group_size).half().float()
    low, high = numbers.view(21, 3, 2, 16).unbind(2)
    found = pack((low | high << 4).flatten(1), scales, -scales, wanted, LAYOUT, in_pairs=True)
    assert torch.equal(found.dequantised(), pack(numbers, scales, -scales, wanted, LAYOUT).dequantised())


def test_the_smallest_format_is_taken_that_holds_a_weight_exactly() -> None:
    assert format_for(4, 32, half_scales=True) == FORMATS[0]
    assert format_for(4, 32, half_scales=False) == FORMATS[1]
    assert format_for(8, 32, half_scales=True) == FORMATS[2]
    assert format_for(8, 32, half_scales=False) == format_for(8, 16, half_scales=False) == FORMATS[3]


def test_a_scale_that_half_precision_cannot_hold_is_refused() -> None:
    numbers, large = torch.zeros(LAYOUT.lanes, 32, dtype=torch.uint8), torch.full((LAYOUT.lanes, 1), 1e6)
    with pytest.raises(OverflowError):
        pack(numbers, large, large, FORMATS[0], LAYOUT)
    assert pack(numbers, large, large, FORMATS[1], LAYOUT).dequantised().max() == 1e6


@pytest.mark.parametrize("wanted", FORMATS)
def test_a_weight_may_be_a_single_panel(wanted: PanelFormat) -> None:
    numbers, scales = torch.ones(5, 96, dtype=torch.uint8), torch.rand(5, 96 // wanted.group_size).half().float()
    packed = pack(numbers, scales, scales, wanted, PanelLayout(8))
    assert torch.equal(packed.dequantised(), 2 * scales.repeat_interleave(wanted.group_size, dim=1))


def test_inputs_are_rounded_by_groups() -> None:
    x = torch.randn(3, 64)
    assert (rounded(x) - x).abs().max() <= x.abs().max() / 254 * 1.01
    assert torch.equal(rounded(torch.zeros(2, 32)), torch.zeros(2, 32))
    alone = x.clone()
    alone[:, 16:] = 0
    assert torch.equal(rounded(alone)[:, :16], rounded(x)[:, :16])


def models(wanted: PanelFormat, **changes: object) -> tuple[DenseConfig, DecoderWeights]:
    c = config(**SIZES, **changes)
    weights = random_weights(c)
    layers = [
        layer._replace(
            **{name: quantised(getattr(layer, name), wanted) for name in ("qkv", "output", "gate_up", "down")}
        )
        for layer in weights.layers
    ]
    embedding = quantised(weights.embedding, wanted)
    head = embedding if c.tied_embeddings else quantised(weights.head, wanted)
    return c, DecoderWeights(embedding, layers, weights.norm, head)


def native(c: DenseConfig, weights: DecoderWeights, cache: Tensor, num_threads: int = 2) -> FusedStep:
    return FusedStep(
        weights, c.heads, c.norm_eps, DenseModel(c, weights, REFERENCE, MAX_MODEL_LEN).rotations, cache, num_threads
    )


def run(c: DenseConfig, weights: DecoderWeights, cache: Tensor, step: Step, num_threads: int = 2) -> Tensor:
    stepper = native(c, weights, cache, num_threads)
    logits = stepper(step.tokens, step.positions, step.batch)
    stepper.close()
    return logits


@pytest.mark.parametrize("family", [{}, {"tied_embeddings": True}, {"qkv_bias": True, "qk_norm": True}])
@pytest.mark.parametrize("wanted", FORMATS)
def test_the_native_step_gives_the_reference_s_logits(wanted: PanelFormat, family: dict[str, bool]) -> None:
    c, weights = models(wanted, **family)
    cache = random_cache(c, 64, 16)
    step = random_step(c, [1, 1, 1, 9, 40], [50, 130, 257, 9, 200], cache)
    model, wanted_cache = DenseModel(c, weights, REFERENCE, MAX_MODEL_LEN), cache.clone()
    expected = model.logits(model.forward(step.tokens, step.positions, wanted_cache, step.batch))
    logits = run(c, weights, cache, step)
    # An input near the border of two whole numbers may be rounded to either; which ones are differs by processor.
    errors = (logits - expected).abs()
    assert errors.median() < 1e-4 and errors.max() < 0.1 and (errors > 0.03).float().mean() < 0.002
    torch.testing.assert_close(cache, wanted_cache, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("wanted", FORMATS)
def test_no_sum_of_the_largest_products_overflows(wanted: PanelFormat, sign: float) -> None:
    """Sums of 16 bits would be too small for pairs of products of eight bits."""
    c, weights = models(wanted)
    nothing = {name: torch.zeros_like(getattr(weights.layers[0], name).dequantised()) for name in ("output", "down")}
    layers = [layer._replace(**nothing) for layer in weights.layers]
    most = torch.full((c.vocab_size, c.hidden_size), 2**wanted.bits - 1, dtype=torch.uint8)
    scales = torch.ones(c.vocab_size, c.hidden_size // wanted.group_size)
    embedding = torch.full((c.vocab_size, c.hidden_size), sign)
    head = pack(most, scales, torch.zeros_like(scales), wanted, LAYOUT)
    cache = random_cache(c, 64, 16)
    step = random_step(c, [1, 1, 9], [50, 130, 9], cache)
    largest = DecoderWeights(embedding, layers, torch.ones(c.hidden_size), head)
    logits = run(c, largest, cache, step)
    expected = torch.full_like(logits, sign * c.hidden_size * (2**wanted.bits - 1))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("wanted", FORMATS)
def test_company_and_threads_change_nothing(wanted: PanelFormat) -> None:
    c, weights = models(wanted)
    cache = random_cache(c, 64, 16)
    together = random_step(c, [1, 1, 7, 1, 30], [40, 33, 60, 9, 30], cache)
    logits = run(c, weights, cache.clone(), together, num_threads=3)
    starts = together.batch.query_starts.tolist()
    for i, (start, stop) in enumerate(pairwise(starts)):
        batch = together.batch._replace(
            num_decodes=int(stop - start == 1), query_starts=torch.tensor([0, stop - start]),
            lengths=together.batch.lengths[i : i + 1], block_tables=together.batch.block_tables[i : i + 1],
            slots=together.batch.slots[start:stop],
        )  # fmt: skip
        alone = Step(together.tokens[start:stop], together.positions[start:stop], batch)
        assert torch.equal(run(c, weights, cache.clone(), alone, num_threads=1), logits[start:stop])


def test_a_nan_is_seen_in_the_logits() -> None:
    c, weights = models(FORMATS[0])
    cache = random_cache(c, 8, 16)
    step = random_step(c, [3], [3], cache)
    broken = weights._replace(norm=torch.full_like(weights.norm, float("nan")))
    assert run(c, broken, cache, step).isnan().all()


@pytest.mark.parametrize(("features", "lanes"), [("", 4), ("+avx2,+f16c,+fma", 8)])
def test_older_processors_compute_the_same(features: str, lanes: int) -> None:
    """They have no dot products of bytes: neither VNNI nor Arm's."""
    if not {feature.removeprefix("+") for feature in features.split(",") if feature} <= FEATURES:
        pytest.skip("this processor is another")
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, "-m", "tests.kernels.panel_products"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == f"{lanes}\n", done.stderr


def test_a_checkpoint_of_floats_is_computed_with_eight_bits(tiny_model: Path) -> None:
    """`--quantization int8` on a CPU: the native step multiplies panels, and its logits are near those of floats."""
    asked = Config(
        model=ModelOptions(device="cpu", image_model="none", max_model_len=256),
        backend=BackendOptions(quantization="int8"),
        cache=CacheOptions(num_blocks=64),
    )
    worker = Worker(asked, resolve(str(tiny_model)))
    weights = worker.runner.stepper.model.weights
    assert all(isinstance(weight, QuantisedWeight) for layer in weights.layers for weight in (layer.qkv, layer.down))
    prompt = list(range(3, 60))
    with driving.watched_logits() as seen:
        driving.run(driving.Driven(worker.runner, worker.limits), [driving.request("r", prompt, 2)])
    with driving.watched_logits() as wanted:
        driving.run(driving.load(tiny_model), [driving.request("r", prompt, 2)])
    assert (seen[0] - wanted[0]).norm() / wanted[0].norm() < 0.1
