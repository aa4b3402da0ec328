"""A small diffusion transformer: pixels in patches, modulated by time and by the prompt as a whole (adaLN-zero), and
attending to a language model's hidden states of the prompt.

Text of length 0 is no prompt at all: what classifier-free guidance steers away from.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from weft.errors import ModelError
from weft.hub.jsonfile import read_text

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
NORM_EPS = 1e-5


class DitConfig(Struct, frozen=True, kw_only=True):
    """The geometry of a diffusion transformer, and how its images are made when a request does not say."""

    model_type: Literal["dit"] = "dit"
    image_size: int = 32
    channels: int = 3
    patch_size: int = 4
    width: int = 256
    depth: int = 6
    num_heads: int = 4
    mlp_ratio: int = 2
    text_model: str = "smollm2"
    """Whose hidden states, after its final norm, are the text."""
    text_width: int = 576
    max_text_tokens: int = 32
    num_steps: int = 25
    guidance_scale: float = 3.0
    shift: float = 1.0

    @property
    def num_tokens(self) -> int:
        """What an image counts as in a pass, against a budget of tokens."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        return self.channels, self.image_size, self.image_size


class Dit(nn.Module):
    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.config = config
        width, patch = config.width, config.channels * config.patch_size**2
        self.patches_in = nn.Linear(patch, width)
        self.positions = nn.Parameter(_grid(config.image_size // config.patch_size, width))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.text = nn.Sequential(nn.Linear(config.text_width, width), nn.SiLU(), nn.Linear(width, width))
        self.no_text = nn.Parameter(torch.randn(width) * 0.02)
        """Fills every text up to the longest there can be, so that all have one shape and none is empty."""
        self.pooled_text = nn.Linear(width, width)
        self.modulation = nn.Linear(width, 8 * width)
        """Six are shared by the blocks, each of which adds an offset of its own; two are the end's."""
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.depth))
        self.patches_out = nn.Linear(width, patch)
        for zero in (self.modulation, self.patches_out):
            nn.init.zeros_(zero.weight)
            nn.init.zeros_(zero.bias)
        self._keeps_bits: dict[tuple[int, int], bool] = {}
        """By the number of images and of threads: whether images computed together have the bits of each alone."""

    def forward(self, latents: Tensor, t: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        """The float32 velocity [B, C, H, W] of latents at times t [B], given text [B, L, text width], of which each
        row's first `lengths` [B] tokens count."""
        words, is_word = self._words(text, lengths)
        return self._drawn(latents, words, self._condition(t, words, is_word))

    @torch.inference_mode()
    def velocity(self, latents: Tensor, t: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        """As forward. On a CPU an image's velocity has the same bits whatever else is in the batch."""
        inputs = latents, t, text, lengths
        if latents.device.type != "cpu":
            return self.forward(*inputs)
        size = len(latents), torch.get_num_threads()
        if self._keeps_bits.get(size):
            return self._together(*inputs)
        alone = torch.cat([self._together(*(part[i : i + 1] for part in inputs)) for i in range(len(latents))])
        # Whether the rows of a product of matrices are rounded as in a smaller one depends on the machine's library
        # and on the sizes, not on the values: the first batch of a size tells for all.
        if size not in self._keeps_bits:
            self._keeps_bits[size] = torch.equal(self._together(*inputs), alone)
        return alone

    def _together(self, latents: Tensor, t: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        """As forward, but with what has a single row for each image computed image by image: products of few rows are
        rounded differently at almost every size."""
        words, is_word = self._words(text, lengths)
        conditions = [self._condition(t[i : i + 1], words[i : i + 1], is_word[i : i + 1]) for i in range(len(t))]
        return self._drawn(latents, words, torch.cat(conditions))

    def _words(self, text: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The text in the model's width, filled up to the longest, and which of these words are the text's."""
        missing = self.config.max_text_tokens - text.shape[1]
        if missing < 0:
            raise ValueError(f"{text.shape[1]} tokens of text; {self.config.max_text_tokens} are possible.")
        text = F.pad(text.to(self.positions.dtype), (0, 0, 0, missing))
        is_word = (torch.arange(text.shape[1], device=text.device) < lengths.unsqueeze(1)).unsqueeze(2)
        words = self.text(F.rms_norm(text, text.shape[2:], eps=NORM_EPS))
        return torch.where(is_word, words, self.no_text.to(words.dtype)), is_word

    def _condition(self, t: Tensor, words: Tensor, is_word: Tensor) -> Tensor:
        """What modulates the image, of the time and of the text as a whole: [B, 8, width]."""
        mean = ((words * is_word).sum(1) + self.no_text.to(words.dtype)) / (is_word.sum(1) + 1)
        waves = _waves(t, self.config.width).to(words.dtype)
        condition: Tensor = self.modulation(F.silu(self.time(waves) + self.pooled_text(mean.to(words.dtype))))
        return condition.view(len(t), 8, self.config.width)

    def _drawn(self, latents: Tensor, words: Tensor, condition: Tensor) -> Tensor:
        x = self.patches_in(self._patches(latents).to(self.positions.dtype)) + self.positions
        for block in self.blocks:
            x = block(x, condition[:, :6], words)
        shift, scale = condition[:, 6:].unsqueeze(2).unbind(1)
        return self._image(self.patches_out(_normed(x) * (1 + scale) + shift)).float()

    def _patches(self, images: Tensor) -> Tensor:
        size, side = self.config.patch_size, self.config.image_size // self.config.patch_size
        grid = images.reshape(len(images), self.config.channels, side, size, side, size)
        return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def _image(self, patches: Tensor) -> Tensor:
        size, side = self.config.patch_size, self.config.image_size // self.config.patch_size
        grid = patches.view(len(patches), side, side, self.config.channels, size, size)
        return grid.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


class _Block(nn.Module):
    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.width * config.mlp_ratio
        self.head_dim = width // config.num_heads
        self.offsets = nn.Parameter(torch.zeros(6, width))
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.text_q = nn.Linear(width, width)
        self.text_kv = nn.Linear(width, 2 * width)
        self.text_mix = nn.Linear(width, width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.norms = nn.ModuleList(nn.RMSNorm(self.head_dim, eps=NORM_EPS) for _ in range(2))
        self.text_norms = nn.ModuleList(nn.RMSNorm(self.head_dim, eps=NORM_EPS) for _ in range(2))
        nn.init.zeros_(self.text_mix.weight)
        nn.init.zeros_(self.text_mix.bias)

    def forward(self, x: Tensor, shared: Tensor, words: Tensor) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = (shared + self.offsets).unsqueeze(2).unbind(1)
        q, k, v = self.qkv(_normed(x) * (1 + scale) + shift).chunk(3, dim=2)
        x = x + gate * self.mix(self._attend(self.norms, q, k, v))
        k, v = self.text_kv(words).chunk(2, dim=2)
        q = self.text_q(_normed(x))
        x = x + self.text_mix(self._attend(self.text_norms, q, k, v))
        hidden = self.up(_normed(x) * (1 + mlp_scale) + mlp_shift)
        out: Tensor = x + mlp_gate * self.down(F.gelu(hidden, approximate="tanh"))
        return out

    def _attend(self, norms: nn.ModuleList, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.reshape(*part.shape[:2], -1, self.head_dim).transpose(1, 2) for part in (q, k, v))
        q, k = (norm(part).to(v.dtype) for norm, part in zip(norms, (q, k), strict=True))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[2:], eps=NORM_EPS)


def _grid(side: int, width: int) -> Tensor:
    """The places of a square of patches, row by row: [side * side, width]."""
    along = _waves(torch.arange(side) / 1000, width // 2)
    return torch.cat([along.repeat_interleave(side, 0), along.repeat(side, 1)], dim=1)


def _waves(t: Tensor, width: int) -> Tensor:
    """Times of 0 to 1 as sines and cosines, [B, width]."""
    frequencies = torch.exp(torch.arange(width // 2, device=t.device) * (-math.log(10000.0) / (width // 2)))
    angles = 1000 * t.float().unsqueeze(1) * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def save(model: Dit, folder: Path, dtype: torch.dtype = torch.float16) -> None:
    """Write the two files that `load` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(model.config)) + b"\n")
    weights = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS_FILE)


def read_config(folder: Path) -> DitConfig:
    path = folder / CONFIG_FILE
    try:
        config = msgspec.json.decode(read_text(path), type=DitConfig)
    except msgspec.DecodeError as error:
        raise ModelError(f"{path}: not the configuration of a diffusion transformer: {error}.") from error
    sizes = [value for value in msgspec.structs.astuple(config) if isinstance(value, int)]
    if not all(0 < size <= 2**14 for size in sizes):
        raise ModelError(f"{path}: a size is not between 1 and {2**14}.")
    if config.image_size % config.patch_size or config.width % (4 * config.num_heads):
        raise ModelError(f"{path}: images do not divide into patches, or the width into heads of a multiple of 4.")
    return config


def load(folder: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Dit:
    """The model of a folder that holds config.json and model.safetensors, ready to make images."""
    config, path = read_config(folder), folder / WEIGHTS_FILE
    try:
        weights = load_file(path, device=str(device))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: no readable safetensors file: {error}.") from error
    with torch.device("meta"):
        model = Dit(config)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if expected != {name: tensor.shape for name, tensor in weights.items()}:
        raise ModelError(f"{path}: the tensors are not those that {CONFIG_FILE} describes.")
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, assign=True)
    return model.requires_grad_(False).eval()
