"""Texts in the worker: the hidden states that images are drawn from, of prompts that rows have encoded or that clients
sent. Which slot is whose is the scheduler's to say."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.payloads import BFLOAT16, PromptEmbeds
from weft.plan import Held
from weft.worker.transfer import sent


class TextTable:
    def __init__(
        self, num_slots: int, max_tokens: int, width: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.states = torch.zeros(num_slots, max_tokens, width, dtype=dtype, device=device)
        """What lies behind a text's last token is of an older one."""

    @property
    def num_bytes(self) -> int:
        return self.states.numel() * self.states.element_size()

    def hold(self, held: Held, start: int, states: Tensor) -> None:
        """Keep the hidden states of a prompt's tokens from `start` on."""
        self.states[held.slot, start : start + len(states)] = states

    def put(self, slot: int, embeds: PromptEmbeds) -> None:
        """Keep those that a client sent. Does not wait for the device."""
        values = torch.from_numpy(embeds.array().copy())
        if embeds.dtype == BFLOAT16:
            values = values.view(torch.bfloat16)
        self.states[slot, : len(values)] = sent(values, self.states.device)
