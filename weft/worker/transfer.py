"""To the device and back, by copies that nobody waits for until they are read."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return tensor
    # Pinned memory is fresh every time: the last copy may still be under way.
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def arrival_of(tensor: Tensor) -> torch.cuda.Event | None:
    """When everything that was sent so far is on the host; None: it is."""
    if not tensor.is_cuda:
        return None
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return arrived
