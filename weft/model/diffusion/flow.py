"""Flow matching: from noise at time 1 to an image at time 0, along a velocity that a model gives.

A step is a pure function of the latents, two times and the velocity, so a request that stopped after any step goes
on from its latents and the number of steps done. Images of a batch may be at different times: `t` is [B].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from weft.types import FlowSampler

Velocity = Callable[[Tensor, Tensor], Tensor]
"""The velocity of latents [B, C, H, W] at times [B]."""
Step = Callable[[Tensor, Tensor, Tensor, Velocity], Tensor]


def times(num_steps: int, shift: float = 1.0) -> Tensor:
    """Return [steps + 1] float32 from 1 to 0: step i goes from times[i] to times[i + 1]. A shift above 1 spends more of
    the steps near the noise, where an image's layout is decided."""
    even = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return (shift * even / (1 + (shift - 1) * even)).float()


def noise(seed: int, shape: Sequence[int], *, step: int = 0) -> Tensor:
    """Return standard normal float32 noise on the CPU, a function of seed, step and shape alone: the generator (Philox)
    has (seed, step) as its key and no state that outlives the call. Step 0 is the start of an image."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, step], dtype=np.uint64)))
    return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=np.float32))


def euler(x: Tensor, t: Tensor, t_next: Tensor, velocity: Velocity) -> Tensor:
    return _moved(x, t_next - t, velocity(x, t))


def heun(x: Tensor, t: Tensor, t_next: Tensor, velocity: Velocity) -> Tensor:
    """Make a step along the mean of the velocities at both ends of it."""
    here = velocity(x, t)
    there = velocity(_moved(x, t_next - t, here), t_next)
    return _moved(x, t_next - t, (here + there) / 2)


STEPS: dict[FlowSampler, Step] = {"euler": euler, "heun": heun}


def guided(conditional: Tensor, unconditional: Tensor, scale: Tensor) -> Tensor:
    """Return the velocity of classifier-free guidance: from that without the prompt (or with the negative one) through
    that with it, `scale` [B] times as far. 1 is the prompt alone."""
    return torch.lerp(unconditional, conditional, _by_image(scale, conditional))


def pixels(x: Tensor) -> Tensor:
    """Return images of -1 to 1, [B, 3, H, W], as bytes [B, H, W, 3]."""
    return ((x.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _moved(x: Tensor, by: Tensor, velocity: Tensor) -> Tensor:
    return x + _by_image(by, x) * velocity


def _by_image(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like).view(-1, 1, 1, 1)
