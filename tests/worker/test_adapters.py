"""Rows with LoRA adapters: the logits of a model with the adapter in its weights, in any company, and nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from tests.tiny_adapters import lora_tensors, save_adapter, save_merged
from tests.tiny_models import SPECS, VOCAB_SIZE
from tests.worker.driving import Driven, load, request, run, under_reference, watched_logits
from weft.types import Adapter, Request

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [(31 * i + 2) % VOCAB_SIZE for i in range(37)]
NUM_TOKENS = 12
SCALE = 2.0
"""lora_alpha over r, as `save_adapter` writes them."""


def with_adapter(made: Request, adapter: Adapter | None) -> Request:
    return replace(made, adapter=adapter)


def logits_of(driven: Driven, made: Request) -> tuple[Tensor, list[int]]:
    """Of every step of a request that runs alone."""
    with watched_logits() as seen:
        tokens = run(driven, [made]).tokens(made.request_id)
    return torch.cat(seen), tokens


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Adapter]:
    made: dict[tuple[str, int], Adapter] = {}

    def adapter(name: str, number: int = 1) -> Adapter:
        if (name, number) not in made:
            folder = save_adapter(name, tmp_path_factory.mktemp("adapter"), seed=number)
            made[name, number] = Adapter(name=f"style {number}", number=number, path=str(folder))
        return made[name, number]

    return adapter


@pytest.mark.parametrize("name", SPECS)
def test_the_logits_are_those_of_the_merged_weights(
    name: str, adapters: Callable[..., Adapter], tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    merged = load(save_merged(name, tmp_path, lora_tensors(name, 1), SCALE))
    expected, tokens = logits_of(merged, request("r", PROMPT, NUM_TOKENS))
    driven = load(tiny_directory(name))
    for how in (driven, under_reference(driven)):
        found, written = logits_of(how, with_adapter(request("r", PROMPT, NUM_TOKENS), adapters(name)))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        assert written == tokens
    plain, _ = logits_of(driven, request("r", PROMPT, 1))
    assert (plain - expected[:1]).abs().max() > 0.1, "an adapter that changes nothing proves nothing"


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.in_gguf])
def test_a_gguf_model_takes_the_same_adapter(
    name: str, adapters: Callable[..., Adapter], tiny_gguf: Callable[[str, str], Path], tmp_path: Path
) -> None:
    merged = load(save_merged(name, tmp_path, lora_tensors(name, 1), SCALE))
    expected, _ = logits_of(merged, request("r", PROMPT, NUM_TOKENS))
    found, _ = logits_of(load(tiny_gguf(name, "F32")), with_adapter(request("r", PROMPT, NUM_TOKENS), adapters(name)))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
