"""The table of ops. Each device has one; the torch reference is the one that the others are tested against."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from weft.kernels import reference, sampling
from weft.kernels.batch import AdapterGroups, AttentionBatch, HeadNorms, HeadShape
from weft.kernels.kv_cache import LayerCache
from weft.kernels.weights import SlotLowRank, Weight


class Ops(NamedTuple):
    """The ops have the signatures and meanings of the functions of the same names in `reference` and `sampling`."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    linear: Callable[[Tensor, Weight, Tensor | None], Tensor]
    norm_linear: Callable[[Tensor, Tensor, float, Weight, Tensor | None], Tensor]
    norm_gate_up: Callable[[Tensor, Tensor, float, Weight], Tensor]
    linear_add: Callable[[Tensor, Weight, Tensor | None, Tensor], None]
    add_mlp: Callable[[Tensor, Tensor, float, Weight, Weight], None]
    rotate_and_store: Callable[[Tensor, HeadShape, Tensor, LayerCache, Tensor, HeadNorms | None], None]
    attention: Callable[[Tensor, HeadShape, LayerCache, AttentionBatch], Tensor]
    lora_shrink: Callable[[Tensor, SlotLowRank, AdapterGroups], Tensor]
    lora_expand_add: Callable[[Tensor, SlotLowRank, AdapterGroups, Tensor], None]
    lora_expand_gate: Callable[[Tensor, Tensor, SlotLowRank, AdapterGroups], Tensor]
    gather_inputs: Callable[[Tensor, Tensor, int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    greedy: Callable[[Tensor], tuple[Tensor, Tensor]]
    keep_thresholds: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    gumbel_sample: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]

    def with_mlp_in_parts(self) -> Ops:
        """Return a table whose `add_mlp` is this one's `norm_gate_up` and `linear_add`."""

        def add_mlp(residual: Tensor, norm: Tensor, eps: float, gate_up: Weight, down: Weight) -> None:
            self.linear_add(self.norm_gate_up(residual, norm, eps, gate_up), down, None, residual)

        return self._replace(add_mlp=add_mlp)


REFERENCE = Ops(
    rms_norm=reference.rms_norm,
    linear=reference.linear,
    norm_linear=reference.norm_linear,
    norm_gate_up=reference.norm_gate_up,
    linear_add=reference.linear_add,
    add_mlp=reference.add_mlp,
    rotate_and_store=reference.rotate_and_store,
    attention=reference.attention,
    lora_shrink=reference.lora_shrink,
    lora_expand_add=reference.lora_expand_add,
    lora_expand_gate=reference.lora_expand_gate,
    gather_inputs=reference.gather_inputs,
    greedy=reference.greedy,
    keep_thresholds=sampling.keep_thresholds,
    gumbel_sample=sampling.gumbel_sample,
)
