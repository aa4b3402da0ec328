"""Switches optimisations off, so that the worth of each can be measured: WEFT_WITHOUT=graphs,gemv."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache

from weft.errors import ConfigError

VARIABLE = "WEFT_WITHOUT"
SHARED_GPU = "WEFT_TEST_SHARED_GPU"
"""A variable for tests: with it ranks may share a GPU, where they are slower than one rank."""
SWITCHES = {
    "overlap": "a step is launched before the last one is read",
    "compile-ahead": "kernels of GPUs are compiled by all cores, while weights are loaded",
    "graphs": "steps are replayed as CUDA graphs",
    "prompt-graphs": "steps with prompts are, too",
    "early-launch": "a kernel of a graph starts while the one before it ends",
    "one-shot": "ranks on GPUs add up small tensors through each other's memory; off: NCCL does",
    "gemv": "linear layers of one row are matrix-vector products, fused with their neighbours",
    "streamed-gemv": "large ones have a kernel of their own for compute capability 9",
    "skinny": "linear layers of a few rows are read at the memory's speed, fused with their neighbours",
    "library-attention": "a long prompt that is alone in its step goes to cuDNN's attention",
    "wide-prefill": "attention of many prompt tokens has a kernel of its own for compute capability 9",
    "wide-linears": "products of many rows of eight bits have one, too",
    "last-tokens": "the last layer computes only the tokens that sample",
    "denoise-steps": "images advance a step at a time beside the tokens of other requests; off: all steps at once",
    "denoise-batches": "images make their steps together; off: one image after the other",
}


@cache
def is_on(name: str) -> bool:
    return name not in switched_off(os.environ)


def switched_off(environment: Mapping[str, str]) -> set[str]:
    """Return the names that are switched off. Raises ConfigError for an unknown name."""
    names = {name.strip() for name in environment.get(VARIABLE, "").split(",") if name.strip()}
    if unknown := names - SWITCHES.keys():
        raise ConfigError(f"{VARIABLE}: there is no switch {min(unknown)!r}.", hint=f"Known: {', '.join(SWITCHES)}.")
    return names
