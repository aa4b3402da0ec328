"""The diffusion transformer on a CPU: images keep their bits in any batch, with texts that were read once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.model.test_dit import SMALL, Inputs, inputs, scrambled
from weft.model.diffusion.dit import BatchInvariantDit, Dit, DitConfig, KeysValues, encoded_bytes


def velocities(model: BatchInvariantDit, given: Inputs, chosen: list[int]) -> Tensor:
    latents, t, text, lengths = (part[chosen] for part in given)
    return model.velocity(latents, t, [model.encode(text[i, :length]) for i, length in enumerate(lengths.tolist())])


def alone(model: BatchInvariantDit, given: Inputs) -> Tensor:
    return torch.cat([velocities(model, given, [i]) for i in range(len(given[0]))])


@pytest.mark.parametrize(
    ("config", "sizes"), [(SMALL, (2, 3, 7, 8)), (DitConfig(), (2, 5))], ids=["small", "as trained"]
)
def test_an_image_has_the_same_bits_in_any_batch(config: DitConfig, sizes: tuple[int, ...]) -> None:
    model, given = BatchInvariantDit(scrambled(config)), inputs(config, max(sizes))
    expected = alone(model, given)
    assert expected.std() > 0.1
    for size in sizes:
        forwards = list(range(size))
        for chosen in (forwards, forwards[::-1]):
            for _ in range(2):  # the first batch of a size is computed in another way than those that follow
                assert torch.equal(velocities(model, given, chosen), expected[chosen])


@pytest.mark.parametrize("chosen", [[0], [0, 0], [1, 0, 2, 0]], ids=["alone", "all", "among others"])
def test_an_image_without_a_text_has_the_velocity_that_training_knows(chosen: list[int]) -> None:
    dit, given = scrambled(SMALL), inputs(SMALL, 3)
    assert given[3][0] == 0
    expected = dit(*(part[chosen] for part in given))
    torch.testing.assert_close(velocities(BatchInvariantDit(dit), given, chosen), expected, rtol=1e-4, atol=1e-4)


def test_a_reading_is_as_large_as_it_is_counted() -> None:
    encoded = BatchInvariantDit(scrambled(SMALL)).encode(torch.zeros(SMALL.max_text_tokens, SMALL.text_width))
    assert encoded is not None
    held = [encoded.pooled, *(part for block in encoded.keys_values for part in block)]
    assert sum(part.untyped_storage().nbytes() for part in held) == encoded_bytes(SMALL, torch.float32)


def test_training_and_drawing_compute_the_same_function() -> None:
    dit, given = scrambled(SMALL), inputs(SMALL, 9)
    torch.testing.assert_close(
        velocities(BatchInvariantDit(dit), given, list(range(9))), dit(*given), rtol=1e-4, atol=1e-4
    )


def test_where_sizes_round_differently_images_are_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Dit.denoise

    def rounded(self: Dit, latents: Tensor, condition: Tensor, words: list[KeysValues]) -> Tensor:
        return exact(self, latents, condition, words) * (1 + 1e-6 * len(latents))

    model, given = BatchInvariantDit(scrambled(SMALL)), inputs(SMALL, 4)
    monkeypatch.setattr(Dit, "denoise", rounded)
    expected = alone(model, given)
    for _ in range(2):
        assert torch.equal(velocities(model, given, [0, 1, 2, 3]), expected)
    assert model._keeps_bits[4, 2, torch.get_num_threads()] is False
