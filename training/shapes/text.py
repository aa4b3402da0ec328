"""What the language model makes of prompts: its hidden states after the final norm.

They are causal: a token's state is the same in every prompt that begins alike, so a state is kept once for each
beginning, and a prompt is the list of its beginnings.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from training.shapes.data import EncodedPrompts
from weft.checkpoint.tokenizer_assets import text_assets
from weft.hub.resolve import resolve
from weft.kernels import REFERENCE, AttentionBatch
from weft.model.dense import DenseModel
from weft.model.loader import load_weights, open_model
from weft.text.tokenizer import Tokenizer

BATCH = 64


class TextEncoder:
    """The default language model on the CPU, in float32."""

    def __init__(self, name: str = "smollm2", longest: int = 32) -> None:
        files = resolve(name)
        self.tokenizer = Tokenizer.from_assets(text_assets(files))
        device = torch.device("cpu")
        with open_model(files) as (config, source):
            weights = load_weights(files, config, source, dtype=torch.float32, device=device)
        self.model = DenseModel(config, weights, REFERENCE, longest)
        self.longest = longest

    def encode(self, texts: Sequence[str]) -> EncodedPrompts:
        tokens = [self.tokenizer.encode(text) for text in texts]
        if max(map(len, tokens)) > self.longest:
            raise ValueError(f"A prompt has more than {self.longest} tokens.")
        states: list[NDArray[np.float16]] = []
        place_of: dict[tuple[int, ...], int] = {}
        places = np.zeros((len(texts), max(map(len, tokens))), dtype=np.int32)
        # Neighbours in this order share beginnings: those computed by an earlier batch are merely dropped.
        for start in range(0, len(texts), BATCH):
            batch = tokens[start : start + BATCH]
            hidden = iter(self._hidden(batch))
            for row, ids in enumerate(batch, start):
                for end in range(1, len(ids) + 1):
                    state = next(hidden)
                    if tuple(ids[:end]) not in place_of:
                        place_of[tuple(ids[:end])] = len(states)
                        states.append(state)
                    places[row, end - 1] = place_of[tuple(ids[:end])]
        return EncodedPrompts(np.stack(states), places, np.array([len(ids) for ids in tokens], dtype=np.int32))

    @torch.inference_mode()
    def _hidden(self, batch: list[list[int]]) -> NDArray[np.float16]:
        """The states of all tokens, prompt after prompt; each prompt has one block of the cache."""
        config = self.model.config
        lengths = [len(ids) for ids in batch]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        positions = torch.cat([torch.arange(length) for length in lengths])
        blocks = torch.arange(1, len(batch) + 1)
        cache = torch.zeros(
            config.num_layers,
            len(batch) + 1,
            self.longest,
            2,
            config.num_kv_heads,
            config.head_dim,
            dtype=torch.float32,
        )
        attention = AttentionBatch(
            num_decodes=0,
            query_starts=torch.from_numpy(starts),
            lengths=torch.tensor(lengths),
            block_tables=blocks[:, None],
            slots=torch.repeat_interleave(blocks, torch.tensor(lengths)) * self.longest + positions,
        )
        ids = torch.tensor([token for prompt in batch for token in prompt])
        hidden: NDArray[np.float16] = self.model.forward(ids, positions, cache, attention).half().numpy()
        return hidden
