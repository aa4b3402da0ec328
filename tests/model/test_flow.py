"""Flow matching: steps are pure, resumable and the same for an image alone or among others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft.model.diffusion import flow
from weft.types import VELOCITIES, FlowSampler

SHAPE = (3, 8, 8)


def test_times_run_from_noise_to_image() -> None:
    even = flow.times(4)
    assert even.tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    shifted = flow.times(4, shift=3.0)
    assert shifted[0] == 1
    assert shifted[-1] == 0
    assert (shifted[1:-1] > even[1:-1]).all()
    assert (shifted.diff() < 0).all()


def test_noise_is_a_function_of_seed_and_step() -> None:
    first = flow.noise(7, SHAPE)
    flow.noise(8, (5, 5))
    torch.randn(3)
    assert torch.equal(flow.noise(7, SHAPE), first)
    for other in (
        flow.noise(8, SHAPE),
        flow.noise(7, SHAPE, step=1),
        flow.noise(-7, SHAPE),
        flow.noise(2**64 - 1, SHAPE),
    ):
        assert not torch.equal(other, first)
    many = flow.noise(1, (100_000,))
    assert abs(many.mean()) < 0.02
    assert abs(many.std() - 1) < 0.02


@pytest.mark.parametrize("sampler", list(flow.STEPS))
def test_a_step_asks_for_the_velocity_as_often_as_it_says(sampler: FlowSampler) -> None:
    asked = []

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        asked.append(t.tolist())
        return torch.full_like(x, 2.0)

    x = torch.zeros(2, *SHAPE)
    moved = flow.STEPS[sampler](x, torch.tensor([1.0, 0.5]), torch.tensor([0.75, 0.0]), velocity)
    assert len(asked) == VELOCITIES[sampler]
    assert torch.equal(moved[0], torch.full(SHAPE, -0.5))
    assert torch.equal(moved[1], torch.full(SHAPE, -1.0))


def test_heun_follows_a_bend_that_euler_cuts() -> None:
    def velocity(x: Tensor, t: Tensor) -> Tensor:
        return (2 * t).view(-1, 1, 1, 1).expand_as(x)

    x, t, t_next = torch.ones(1, *SHAPE), torch.tensor([1.0]), torch.tensor([0.0])
    torch.testing.assert_close(flow.heun(x, t, t_next, velocity), torch.zeros(1, *SHAPE))
    torch.testing.assert_close(flow.euler(x, t, t_next, velocity), torch.full((1, *SHAPE), -1.0))


def bent(x: Tensor, t: Tensor) -> Tensor:
    return torch.sin(3 * x) + t.view(-1, 1, 1, 1)


@pytest.mark.parametrize("sampler", list(flow.STEPS))
def test_a_stopped_image_goes_on_as_if_it_had_not_stopped(sampler: FlowSampler) -> None:
    grid, step = flow.times(6, 2.0), flow.STEPS[sampler]

    def run(x: Tensor, start: int, stop: int) -> Tensor:
        for i in range(start, stop):
            x = step(x, grid[i : i + 1], grid[i + 1 : i + 2], bent)
        return x

    x = flow.noise(3, (1, *SHAPE))
    kept = run(x, 0, 4).numpy().tobytes()
    resumed = torch.frombuffer(bytearray(kept), dtype=torch.float32).view(1, *SHAPE)
    assert torch.equal(run(resumed, 4, 6), run(x, 0, 6))


@pytest.mark.parametrize("sampler", list(flow.STEPS))
def test_images_at_different_steps_share_a_batch(sampler: FlowSampler) -> None:
    step, x = flow.STEPS[sampler], flow.noise(4, (3, *SHAPE))
    t, t_next = torch.tensor([1.0, 0.6, 0.2]), torch.tensor([0.9, 0.4, 0.0])
    alone = [step(x[i : i + 1], t[i : i + 1], t_next[i : i + 1], bent) for i in range(3)]
    assert torch.equal(step(x, t, t_next, bent), torch.cat(alone))


def test_guidance_leads_from_without_through_with_the_prompt() -> None:
    with_prompt, without = torch.full((3, *SHAPE), 3.0), torch.full((3, *SHAPE), 1.0)
    guided = flow.guided(with_prompt, without, torch.tensor([0.0, 1.0, 2.5]))
    assert guided[:, 0, 0, 0].tolist() == [1.0, 3.0, 6.0]


def test_pixels_are_bytes_of_the_whole_range() -> None:
    x = torch.tensor([-3.0, -1.0, 0.0, 1.0]).view(1, 1, 2, 2).expand(1, 3, 2, 2)
    pixels = flow.pixels(x)
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (1, 2, 2, 3)
    assert pixels[0, :, :, 1].tolist() == [[0, 0], [128, 255]]
