"""A small diffusion transformer: its tokens are patches of pixels, modulated by the time and the pooled prompt
(adaLN-zero), which attend to a language model's hidden states of the prompt.

A prompt of length 0 is the unconditional one of classifier-free guidance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, cast

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from weft.checkpoint.json_file import read_text
from weft.errors import ModelError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
NORM_EPS = 1e-5


class DitConfig(Struct, frozen=True, kw_only=True):
    """The geometry of a diffusion transformer, and its defaults for requests."""

    model_type: Literal["dit"] = "dit"
    image_size: int = 32
    channels: int = 3
    patch_size: int = 4
    width: int = 256
    depth: int = 6
    num_heads: int = 4
    mlp_ratio: int = 2
    text_model: str = "smollm2"
    """The language model whose hidden states, after its final norm, are the prompt embeds."""
    text_width: int = 576
    max_text_tokens: int = 32
    num_steps: int = 25
    guidance_scale: float = 3.0
    shift: float = 1.0

    @property
    def num_tokens(self) -> int:
        """Tokens that one pass over an image counts as."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        return self.channels, self.image_size, self.image_size


class KeysValues(NamedTuple):
    """The keys and values of prompt tokens that one block attends to: [B, tokens, heads, head dim] each."""

    keys: Tensor
    values: Tensor


class EncodedPrompts(NamedTuple):
    """Prompts as the model's blocks use them, at any time of the image."""

    pooled: Tensor
    """Each prompt as one vector: [B, width]."""
    keys_values: list[KeysValues]
    """The keys and values of each block."""


class Dit(nn.Module):
    """The diffusion transformer."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.config = config
        width, patch = config.width, config.channels * config.patch_size**2
        self.patches_in = nn.Linear(patch, width)
        self.positions = nn.Parameter(torch.empty(config.num_tokens, width))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.text = nn.Sequential(nn.Linear(config.text_width, width), nn.SiLU(), nn.Linear(width, width))
        self.no_text = nn.Parameter(torch.empty(width))
        """The padding of every prompt up to the longest possible, so that all have one shape and none is empty."""
        self.pooled_text = nn.Linear(width, width)
        self.modulation = nn.Linear(width, 8 * width)
        """Six vectors are shared by the blocks, each of which adds its own offsets; two are for the output."""
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.depth))
        self.patches_out = nn.Linear(width, patch)
        for zero in (self.modulation, self.patches_out):
            nn.init.zeros_(zero.weight)
            nn.init.zeros_(zero.bias)
        # A model on the meta device is filled from a file: initialising it would import torch's compiler, for two
        # seconds.
        if not self.positions.is_meta:
            self.positions.data = _grid(config.image_size // config.patch_size, width)
            nn.init.normal_(self.no_text, std=0.02)

    def forward(self, latents: Tensor, t: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        """Return the float32 velocity [B, C, H, W] of latents at times t [B], given prompt embeds [B, L, text width],
        of which each row's first `lengths` [B] tokens count."""
        encoded = self.encode(text, lengths)
        return self.denoise(latents, self.condition(t, encoded.pooled), encoded.keys_values)

    @torch.inference_mode()
    def velocity(self, latents: Tensor, t: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        return self.forward(latents, t, text, lengths)

    def encode(self, text: Tensor, lengths: Tensor) -> EncodedPrompts:
        """Encode prompts for all passes over an image, whatever the time."""
        missing = self.config.max_text_tokens - text.shape[1]
        if missing < 0:
            raise ValueError(f"{text.shape[1]} tokens of text; {self.config.max_text_tokens} are possible.")
        text = F.pad(text.to(self.positions.dtype), (0, 0, 0, missing))
        is_token = (torch.arange(text.shape[1], device=text.device) < lengths.unsqueeze(1)).unsqueeze(2)
        tokens = self.text(F.rms_norm(text, text.shape[2:], eps=NORM_EPS))
        no_text = self.no_text.to(tokens.dtype)
        tokens = torch.where(is_token, tokens, no_text)
        mean = ((tokens * is_token).sum(1) + no_text) / (is_token.sum(1) + 1)
        return EncodedPrompts(self.pooled_text(mean.to(tokens.dtype)), [block.encode(tokens) for block in self._each()])

    @cached_property
    def nothing(self) -> list[Tensor]:
        """The sum that every block adds to an image without a prompt: all its tokens are padding, so attention returns
        the padding's value."""
        return [block.attention_to(self.no_text) for block in self._each()]

    def condition(self, t: Tensor, pooled: Tensor) -> Tensor:
        """Return the modulation of images by the time and the pooled prompt: [B, 8, width]."""
        waves = _waves(t, self.config.width).to(pooled.dtype)
        condition: Tensor = self.modulation(F.silu(self.time(waves) + pooled))
        return condition.view(len(t), 8, self.config.width)

    def denoise(self, latents: Tensor, condition: Tensor, keys_values: list[KeysValues]) -> Tensor:
        """Return the velocity. Images behind those that `keys_values` has rows for have no prompt."""
        x = self.patches_in(self._patches(latents).to(self.positions.dtype)) + self.positions
        without = self.nothing if len(keys_values[0].keys) < len(x) else [None] * len(keys_values)
        for block, prompts, nothing in zip(self._each(), keys_values, without, strict=True):
            x = block(x, condition[:, :6], prompts, nothing)
        shift, scale = condition[:, 6:].unsqueeze(2).unbind(1)
        return self._image(self.patches_out(_modulated(x, shift, scale))).float()

    def _each(self) -> Iterator[_Block]:
        return cast(Iterator[_Block], iter(self.blocks))

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
        self.num_heads = config.num_heads
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

    def forward(self, x: Tensor, shared: Tensor, prompts: KeysValues, nothing: Tensor | None) -> Tensor:
        """Run the block; `nothing` is added to the images behind those that `prompts` has rows for."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = (shared + self.offsets).unsqueeze(2).unbind(1)
        qk, v = self._heads(self.qkv(_modulated(x, shift, scale))).tensor_split([2 * self.num_heads], dim=2)
        weights = torch.stack(list(self.norms.parameters())).repeat_interleave(self.num_heads, 0)
        q, k = (F.rms_norm(qk, qk.shape[3:], eps=NORM_EPS) * weights).chunk(2, dim=2)
        x = torch.addcmul(x, gate, self.mix(_attended(q, k, v)))
        count = len(prompts.keys)
        q = self.text_norms[0](self._heads(self.text_q(_normed(x[:count]))))
        attended = self.text_mix(_attended(q, *prompts))
        if nothing is None:
            x = x + attended
        else:
            x[:count] += attended
            x[count:] += nothing
        hidden = F.gelu(self.up(_modulated(x, mlp_shift, mlp_scale)), approximate="tanh")
        return torch.addcmul(x, mlp_gate, self.down(hidden))

    def encode(self, tokens: Tensor) -> KeysValues:
        keys, values = self._heads(self.text_kv(tokens)).chunk(2, dim=2)
        return KeysValues(self.text_norms[1](keys).to(values.dtype), values)

    def attention_to(self, token: Tensor) -> Tensor:
        """Return the output of attention to this token alone."""
        found: Tensor = self.text_mix(self.text_kv(token).chunk(2)[1])
        return found

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], x.shape[2] // self.head_dim, self.head_dim)


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention [B, tokens, width] of tensors [B, tokens, heads, head dim]."""
    q, k, v = (part.transpose(1, 2) for part in (q.to(v.dtype), k.to(v.dtype), v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift, _normed(x), 1 + scale)


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[2:], eps=NORM_EPS)


def _grid(side: int, width: int) -> Tensor:
    """Return the position embeddings of a square of patches, row by row: [side * side, width]."""
    along = _waves(torch.arange(side) / 1000, width // 2)
    return torch.cat([along.repeat_interleave(side, 0), along.repeat(side, 1)], dim=1)


def _waves(t: Tensor, width: int) -> Tensor:
    """Return times of 0 to 1 as sines and cosines, [B, width]."""
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
    """Load the model of a folder that holds config.json and model.safetensors."""
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


def encoded_bytes(config: DitConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the longest encoded prompt. Values are a view of the product that keys come from, and keep
    all of it alive."""
    num_vectors = 1 + 3 * config.depth * config.max_text_tokens
    return num_vectors * config.width * dtype.itemsize


class BatchInvariantDit:
    """A diffusion transformer on the CPU whose images have the same bits in every batch."""

    def __init__(self, model: Dit) -> None:
        self._model = model
        self._keeps_bits: dict[tuple[int, int, int], bool] = {}
        """True where images computed together have the bits of each alone, by the number of images, of those with a
        prompt and of threads."""
        with torch.inference_mode():
            self._no_prompt = model.encode(
                torch.zeros(1, 0, model.config.text_width), torch.zeros(1, dtype=torch.int64)
            )

    @torch.inference_mode()
    def encode(self, embeds: Tensor) -> EncodedPrompts | None:
        """Encode the prompt embeds [tokens, width]; returns None for an empty prompt."""
        return self._model.encode(embeds.unsqueeze(0), torch.tensor([len(embeds)])) if len(embeds) else None

    @torch.inference_mode()
    def velocity(self, latents: Tensor, t: Tensor, prompts: Sequence[EncodedPrompts | None]) -> Tensor:
        """Return the velocity of images at times t [B], each with its prompt."""
        count = len(prompts)
        size = count, sum(prompt is not None for prompt in prompts), torch.get_num_threads()
        if self._keeps_bits.get(size):
            return self._together(latents, t, prompts)
        alone = [self._together(latents[i : i + 1], t[i : i + 1], prompts[i : i + 1]) for i in range(count)]
        # Whether the rows of a product of matrices are rounded as in a smaller one depends on the machine's library
        # and on the sizes, not on the values: the first batch of a size tells for all.
        if size not in self._keeps_bits:
            self._keeps_bits[size] = torch.equal(self._together(latents, t, prompts), torch.cat(alone))
        return torch.cat(alone)

    def _together(self, latents: Tensor, t: Tensor, prompts: Sequence[EncodedPrompts | None]) -> Tensor:
        # Products with a single row for each image are computed image by image: those of few rows are rounded
        # differently at almost every size.
        conditions = [
            self._model.condition(t[i : i + 1], (prompt or self._no_prompt).pooled) for i, prompt in enumerate(prompts)
        ]
        given = [prompt for prompt in prompts if prompt is not None]
        order = sorted(range(len(prompts)), key=lambda i: prompts[i] is None)
        back = sorted(range(len(prompts)), key=order.__getitem__)
        velocity = self._model.denoise(latents[order], torch.cat(conditions)[order], self._keys_values(given))
        return velocity[back]

    def _keys_values(self, prompts: Sequence[EncodedPrompts]) -> list[KeysValues]:
        """Return the keys and values of these prompts together, for every block."""
        if not prompts:
            return [KeysValues(keys[:0], values[:0]) for keys, values in self._no_prompt.keys_values]
        blocks = zip(*(prompt.keys_values for prompt in prompts), strict=True)
        return [KeysValues(*(torch.cat(parts) for parts in zip(*block, strict=True))) for block in blocks]
