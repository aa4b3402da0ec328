"""A diffusion transformer: text counts as far as it goes, files are checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.errors import ModelError
from weft.model.diffusion.dit import CONFIG_FILE, WEIGHTS_FILE, Dit, DitConfig, load, read_config, save

SMALL = DitConfig(image_size=16, width=64, depth=2, num_heads=2, text_width=24, max_text_tokens=8)
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def scrambled(config: DitConfig) -> Dit:
    """A model none of whose parts is left at zero."""
    torch.manual_seed(0)
    model = Dit(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.requires_grad_(False).eval()


def inputs(config: DitConfig, size: int) -> Inputs:
    """Each image at a time of its own, with a text of a length of its own."""
    torch.manual_seed(1)
    longest = config.max_text_tokens
    lengths = (torch.arange(size) * 3) % (longest + 1)
    text = torch.randn(size, longest, config.text_width)
    return torch.randn(size, *config.latent_shape), torch.linspace(1, 0, size), text, lengths


def test_text_counts_as_far_as_its_length() -> None:
    model = scrambled(SMALL)
    latents, t, text, _ = inputs(SMALL, 1)
    t, three = torch.tensor([0.5]), torch.tensor([3])
    expected = model.velocity(latents, t, text, three)
    other_end = torch.cat([text[:, :3], 9 * torch.randn(1, 5, 24)], dim=1)
    assert torch.equal(model.velocity(latents, t, other_end, three), expected)
    assert torch.equal(model.velocity(latents, t, text[:, :3], three), expected)
    assert not torch.allclose(model.velocity(latents, t, text, three + 1), expected, atol=1e-3)
    assert not torch.allclose(model.velocity(latents, t, text.flip(1), three), expected, atol=1e-3)
    none = torch.tensor([0])
    assert torch.equal(model.velocity(latents, t, text, none), model.velocity(latents, t, text.flip(1), none))


def test_text_longer_than_the_model_takes_is_an_error() -> None:
    latents, t, _, lengths = inputs(SMALL, 1)
    with pytest.raises(ValueError, match="9 tokens of text; 8 are possible"):
        scrambled(SMALL).velocity(latents, t, torch.randn(1, 9, 24), lengths)


def test_patches_are_put_back_where_they_were() -> None:
    model, images = Dit(SMALL), torch.randn(2, 3, 16, 16)
    patches = model._patches(images)
    assert torch.equal(patches[1, 6].view(3, 4, 4), images[1, :, 4:8, 8:12])
    assert torch.equal(model._image(patches), images)


def test_a_saved_model_is_loaded_as_it_was(tmp_path: Path) -> None:
    model, given = scrambled(SMALL), inputs(SMALL, 3)
    save(model, tmp_path, torch.float32)
    loaded = load(tmp_path)
    assert loaded.config == SMALL
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert torch.equal(loaded.velocity(*given), model.velocity(*given))
    save(model, tmp_path)
    halved = load(tmp_path).velocity(*given)
    torch.testing.assert_close(halved, model.velocity(*given), rtol=0.02, atol=0.05)


def test_files_that_do_not_fit_each_other_are_an_error(tmp_path: Path) -> None:
    save(Dit(SMALL), tmp_path)
    weights = load_file(tmp_path / WEIGHTS_FILE)
    save_file({name: tensor for name, tensor in weights.items() if name != "no_text"}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(ModelError, match=r"not those that config\.json describes"):
        load(tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"no weights")
    with pytest.raises(ModelError, match="no readable safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "llama"}', "not the configuration of a diffusion transformer"),
        ('{"model_type": "dit", "patch_size": 5}', "do not divide into patches"),
        ('{"model_type": "dit", "width": 250}', "do not divide into patches, or the width"),
        ('{"model_type": "dit", "depth": 0}', "a size is not between 1 and 16384"),
        ('{"model_type": "dit", "width": 1000000}', "a size is not between 1 and 16384"),
    ],
)
def test_a_configuration_that_makes_no_model_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)


def test_loading_does_not_wake_the_compiler(tmp_path: Path) -> None:
    """Its import takes longer than everything else that happens until a server is ready."""
    save(scrambled(SMALL), tmp_path, torch.float32)
    program = "import sys; from pathlib import Path; from weft.model.diffusion.dit import load; load(Path(sys.argv[1]))"
    then = "; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program + then, str(tmp_path)], check=False).returncode == 0
