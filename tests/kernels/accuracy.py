"""What rounding costs: the default model with its weights as they are in the file, or quantised again as for GPUs, to
four or eight bits or e4m3, or with a KV cache of e4m3, halves or int8, against the same in floats.

    python -m tests.kernels.accuracy [--quantization fp8|int8|int4|w4a8] [--kv-cache-dtype fp8|fp16|int8]
    python -m tests.kernels.accuracy --quantization fp8 --weights-alone
    python -m tests.kernels.accuracy --blocks Q4_1|Q8_0|Q4_K|Q6_K

With blocks, a copy of the model in such blocks, or the file itself, is held as on a GPU, its scales as bfloat16,
against the floats that the blocks stand for. The default model's rows are 576 and 1,536 wide: of Q4_K and Q6_K, whose
blocks have 256 columns, `down` alone is so, and the others are Q8_0.

Both read a page of Newton's Opticks, a token after the other from those before it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize
from msgspec import Struct
from torch import Tensor

from tests.quantised_models import gguf_blocks
from weft.checkpoint.model_files import ModelFiles
from weft.checkpoint.tokenizer_assets import text_assets
from weft.hub.resolve import resolve
from weft.kernels import REFERENCE, AttentionBatch, Ops, reference
from weft.kernels.cpu import native_step, panel_layout
from weft.kernels.fp8 import E4M3, Fp8Weight, rounded_rows
from weft.kernels.int_weights import IntWeight
from weft.kernels.kv_cache import zero_cache
from weft.kernels.panel_format import PanelLayout
from weft.kernels.rotated import RotatedWeight, rotated, rotated_rows
from weft.kernels.weights import LayerWeights, Weight
from weft.model.dense import DenseModel
from weft.model.loader import LinearLoading, load_weights, open_model
from weft.text.tokenizer import Tokenizer
from weft.worker.memory_profile import cache_shape

TEXT = Path(__file__).with_name("opticks.txt")
BLOCK = 16
KV_DTYPES = {"fp8": E4M3, "fp16": torch.float16, "int8": torch.int8}


def _linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Round the inputs of a weight of e4m3, as GPUs do with those of several tokens, and of a rotated one."""
    if isinstance(weight, Fp8Weight):
        x = rounded_rows(x)
    elif isinstance(weight, RotatedWeight):
        numbers, scales = rotated_rows(x)
        x = rotated(numbers * scales)
    return reference.linear(x, weight, bias)


def _linear_add(x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor) -> None:
    residual.add_(_linear(x, weight, bias))


ROUNDING = REFERENCE._replace(
    linear=_linear,
    norm_linear=lambda x, norm, eps, weight, bias: _linear(reference.rms_norm(x, norm, eps), weight, bias),
    norm_gate_up=lambda x, norm, eps, weight: reference.silu_mul(_linear(reference.rms_norm(x, norm, eps), weight)),
    linear_add=_linear_add,
).with_mlp_in_parts()


class Accuracy(Struct, frozen=True):
    num_tokens: int
    perplexity: float
    """The perplexity of the text by the weights in floats."""
    rounded_perplexity: float
    divergence: float
    """The mean of the Kullback-Leibler divergences of the next token's distributions, in nats."""
    same_best: float
    """The share of places where both hold the same token the likeliest."""

    @property
    def loss(self) -> float:
        return self.rounded_perplexity / self.perplexity - 1


def measure(
    files: ModelFiles,
    num_tokens: int,
    linears: LinearLoading = "dequantise",
    kv_dtype: torch.dtype = torch.float32,
    ops: Ops = ROUNDING,
) -> Accuracy:
    tokenizer = Tokenizer.from_assets(text_assets(files))
    tokens = torch.tensor(tokenizer.encode(TEXT.read_text())[:num_tokens])
    exact = _log_probabilities(files, None, tokens)
    panels = panel_layout() if (linears, kv_dtype) == ("dequantise", torch.float32) else None
    rounded = _log_probabilities(files, panels, tokens, linears, kv_dtype, ops)
    following = tokens[1:, None]
    return Accuracy(
        num_tokens=len(tokens),
        perplexity=_perplexity(exact, following),
        rounded_perplexity=_perplexity(rounded, following),
        divergence=(exact.exp() * (exact - rounded)).sum(-1).mean().item(),
        same_best=(exact.argmax(-1) == rounded.argmax(-1)).float().mean().item(),
    )


def _log_probabilities(
    files: ModelFiles,
    panels: PanelLayout | None,
    tokens: Tensor,
    linears: LinearLoading = "dequantise",
    kv_dtype: torch.dtype = torch.float32,
    ops: Ops = REFERENCE,
) -> Tensor:
    device = torch.device("cpu")
    with open_model(files) as (config, source):
        weights = load_weights(
            files, config, source, dtype=torch.float32, device=device, panels=panels, linears=linears
        )
    if linears == "keep":
        weights = weights._replace(layers=[_of(layer, _in_bfloat16) for layer in weights.layers])
    if linears == "w4a8":
        weights = weights._replace(layers=[_of(layer, _in_e4m3) for layer in weights.layers])
    count = len(tokens)
    num_blocks = -(-count // BLOCK)
    model = DenseModel(config, weights, ops, num_blocks * BLOCK)
    cache = zero_cache(cache_shape(config, num_blocks + 1, BLOCK), kv_dtype, device)
    batch = AttentionBatch(
        num_decodes=0,
        query_starts=torch.tensor([0, count]),
        lengths=torch.tensor([count]),
        block_tables=torch.arange(1, num_blocks + 1)[None],
        slots=torch.arange(BLOCK, BLOCK + count),
    )
    if linears != "dequantise" or kv_dtype == E4M3:
        return model.logits(model.forward(tokens, torch.arange(count), cache, batch)).log_softmax(-1)
    step = native_step(weights, config.heads, config.norm_eps, model.rotations, cache)
    assert step is not None, "numba is missing"
    logits = step(tokens, torch.arange(count), batch)
    step.close()
    return logits.log_softmax(-1)


def in_blocks(files: ModelFiles, type_name: str, folder: Path) -> ModelFiles:
    """Copy a model with its linear weights in blocks of a type, or of Q8_0 where its rows are no whole blocks."""
    reader = GGUFReader(files.path)
    writer = GGUFWriter(folder / "model.gguf", str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kinds = [*field.types, None]
            writer.add_key_value(field.name, field.contents(), kinds[0], kinds[1])
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            found = type_name if tensor.shape[0] % 256 == 0 or not type_name.endswith("K") else "Q8_0"
            data, kind = gguf_blocks(dequantize(data, kind), found), GGMLQuantizationType[found]
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return resolve(str(folder / "model.gguf"))


def _of(layer: LayerWeights, held: Callable[[Weight], Weight]) -> LayerWeights:
    """Return a layer with its linear weights held otherwise."""
    return layer._replace(**{name: held(getattr(layer, name)) for name in ("qkv", "output", "gate_up", "down")})


def _in_e4m3(weight: Weight) -> Weight:
    """Round a weight of four bits as long prompts multiply it."""
    if not isinstance(weight, IntWeight) or weight.row_scales is None:
        return weight
    return Fp8Weight((weight.dequantised() / weight.row_scales.T).to(E4M3), weight.row_scales)


def _in_bfloat16(weight: Weight) -> Weight:
    """Round what a GPU holds beside the numbers of a weight to bfloat16."""
    if not isinstance(weight, IntWeight):
        return weight
    scales, minima = weight.scales.bfloat16().float(), weight.minima
    return weight._replace(scales=scales, minima=None if minima is None else minima.bfloat16().float())


def _perplexity(log_probabilities: Tensor, following: Tensor) -> float:
    return log_probabilities[:-1].gather(1, following).mean().neg().exp().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--quantization", choices=["fp8", "int8", "int4", "w4a8"])
    parser.add_argument("--weights-alone", action="store_true", help="do not round the inputs of weights of e4m3")
    parser.add_argument("--kv-cache-dtype", choices=list(KV_DTYPES))
    parser.add_argument("--blocks", choices=["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"])
    asked = parser.parse_args()
    kv_dtype = KV_DTYPES.get(asked.kv_cache_dtype, torch.float32)
    files = resolve("smollm2")
    with tempfile.TemporaryDirectory() as folder:
        # The file has Q4_1.
        if asked.blocks not in (None, "Q4_1"):
            files = in_blocks(files, asked.blocks, Path(folder))
        linears = "keep" if asked.blocks else asked.quantization or "dequantise"
        found = measure(files, asked.tokens, linears, kv_dtype, REFERENCE if asked.weights_alone else ROUNDING)
    print(f"tokens                {found.num_tokens:,}")
    print(f"perplexity, floats    {found.perplexity:.4f}")
    print(f"perplexity, rounded   {found.rounded_perplexity:.4f} ({found.loss:+.3%})")
    print(f"KL divergence         {found.divergence:.5f} nats a token")
    print(f"same likeliest token  {found.same_best:.1%}")


if __name__ == "__main__":
    main()
