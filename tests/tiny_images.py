"""Diffusion transformers so small that a test can draw with them: random weights, no picture in them."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.model.diffusion.dit import Dit, DitConfig, save

SIZE = 8


def config(text_width: int, **changes: object) -> DitConfig:
    defaults = {
        "image_size": SIZE,
        "patch_size": 4,
        "width": 32,
        "depth": 2,
        "num_heads": 2,
        "text_model": "tiny",
        "text_width": text_width,
        "max_text_tokens": 24,
        "num_steps": 6,
    }
    return DitConfig(**(defaults | changes))


def save_image_model(folder: Path, text_width: int, **changes: object) -> Path:
    """No weight is zero: text, time and every block must be used to be right."""
    torch.manual_seed(7)
    model = Dit(config(text_width, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save(model, folder, torch.float32)
    return folder
