"""The worker's rows: what it remembers of each admitted request from one step to the next.

A request keeps its row until it ends or is preempted. Tokens and block tables stay on the device: a step gathers
its inputs from them, so the next step can be launched before anybody has read what this one sampled.
"""

from __future__ import annotations

import torch
from msgspec import Struct

from weft.plan import Admission, StepPlan
from weft.types import SamplingParams


class RowState(Struct):
    params: SamplingParams
    num_prompt: int
    stop_token_ids: list[int]
    num_blocks: int = 0


class RowTable:
    def __init__(self, num_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.tokens = torch.zeros(num_rows, max_model_len, dtype=torch.int64, device=device)
        self.blocks = torch.zeros(num_rows, -(-max_model_len // block_size), dtype=torch.int64, device=device)
        self.states: dict[int, RowState] = {}

    def update(self, plan: StepPlan) -> None:
        """Take in what is new in a plan, before its step is computed."""
        for released in plan.release:
            del self.states[released]
        for admission in plan.admit:
            self._admit(admission)
        for row in plan.rows:
            if row.new_blocks:
                state = self.states[row.row]
                end = state.num_blocks + len(row.new_blocks)
                self.blocks[row.row, state.num_blocks : end] = torch.tensor(row.new_blocks)
                state.num_blocks = end

    def _admit(self, admission: Admission) -> None:
        row = admission.row
        self.states[row] = RowState(admission.params, admission.num_prompt_tokens, admission.stop_token_ids)
        self.tokens[row, : len(admission.token_ids)] = torch.tensor(admission.token_ids)
        self.blocks[row] = 0
