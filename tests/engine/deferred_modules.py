"""An engine process that uses modules of torch which its fork server has deferred, and ends with 0:
`ForkCommand("tests.engine.deferred_modules", (HOW,))`.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

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


def main() -> None:
    import torch

    found = DEFERRED & sys.modules.keys()
    assert "torch._meta_registrations" in found and all(map(is_deferred, found)), found
    assert torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3)).sum() == 24
    {"one by one": use_one_by_one, "all at once": use_all_at_once}[sys.argv[1]]()
    os._exit(0)
