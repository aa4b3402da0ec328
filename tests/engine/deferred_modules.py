"""An engine process that uses modules of torch which its fork server has deferred, and ends with 0:
`ForkCommand("tests.engine.deferred_modules", (HOW,))`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args

from weft.engine.fork_server import DEFERRED


def is_deferred(name: str) -> bool:
    return type(sys.modules[name]) is not ModuleType


def use_one_by_one() -> None:
    import torch.distributions.normal
    from torch.distributions import Normal

    assert Normal is torch.distributions.normal.Normal is sys.modules["torch.distributions.normal"].Normal
    assert torch.distributions.normal.__spec__.origin and not is_deferred("torch.distributions")
    assert is_deferred("torch.masked") and is_deferred("torch._meta_registrations")
    assert torch.export.Dim and not is_deferred("torch.export")
    import torch.export.exported_program

    assert torch.export.ExportedProgram is torch.export.exported_program.ExportedProgram
    missing = "no_such_name"
    try:
        getattr(torch.distributions, missing)
    except AttributeError as error:
        assert "torch.distributions" in str(error)
    else:
        raise AssertionError(f"torch.distributions has {missing}")


def use_all_at_once() -> None:
    import torch

    compiled = torch.compile(lambda x: torch.abs(x) * 2, backend="eager")
    assert compiled(torch.ones(3)).sum() == 6
    assert not any(map(is_deferred, DEFERRED & sys.modules.keys()))
    assert torch.abs(torch.ones(3, device="meta")).shape == (3,)


def outline_weights() -> None:
    """Kernels are compiled ahead for weights without memory. With the deferred modules that would begin a second
    later."""
    import torch

    from weft.checkpoint.model_files import ModelFiles
    from weft.model.dense import DenseConfig
    from weft.model.loader import LinearLoading, NoSource, load_weights

    geometry = DenseConfig(
        family="llama", hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=512,
        vocab_size=1000, max_position=4096, norm_eps=1e-6, rope_theta=10000.0,
    )  # fmt: skip
    for linears in get_args(LinearLoading):
        files = ModelFiles(name="", path=Path(), kind="dummy", weight_files=[])
        weights = load_weights(
            files, geometry, NoSource(), dtype=torch.bfloat16, device=torch.device("meta"), linears=linears
        )
        assert len(weights.layers) == geometry.num_layers
    assert is_deferred("torch._meta_registrations")


def main() -> None:
    import torch

    found = DEFERRED & sys.modules.keys()
    assert "torch._meta_registrations" in found and all(map(is_deferred, found)), found
    assert torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3)).sum() == 24
    {"one by one": use_one_by_one, "all at once": use_all_at_once, "outlines": outline_weights}[sys.argv[1]]()
    os._exit(0)
