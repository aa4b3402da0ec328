"""Cursors: how far a request is, and how far it may go.

A request has no phase. Its cursor has `known` units of work and `computed` ones, and scheduling means letting
`computed` catch up with `known`. For tokens a unit is a token: a prompt is many known tokens at once, decoding
is one more known token after each step.
"""

from __future__ import annotations

from weft.scheduler.blocks import Block
from weft.scheduler.prefix import KeyChain, root_key
from weft.types import Request


class TokenCursor:
    """A request for tokens, from its arrival to its end."""

    def __init__(self, request: Request, *, max_model_len: int, block_size: int) -> None:
        self.request = request
        self.tokens = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt = len(request.prompt_token_ids)
        max_tokens = request.params.max_tokens
        wanted = max_model_len if max_tokens is None else self.num_prompt + max_tokens
        self.limit = min(max_model_len, wanted)
        """The output ends when so many tokens are known, prompt included."""

        self.computed = 0
        """Tokens whose keys and values are in the cache, or will be by the steps that are under way."""
        self.pending = 0
        """Tokens that steps under way will sample: known to exist, their values not yet."""
        self.row = -1
        """The worker's row; -1 while the request waits."""
        self.blocks: list[Block] = []
        self.keys = KeyChain(root_key(request.cache_salt), block_size)
        self.holds_all = False
        """Whether `blocks` has room for `limit` tokens: such a request never has to give way again."""
        self.preemptions = 0
        self.cached_tokens = 0
        """Prompt tokens that the prefix cache held at the first admission."""
        self.reported = False
        """Whether an event of this request has left."""
        self.ended = False

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def known(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def todo(self) -> int:
        """Tokens that a step could compute now. The last one that may be known need not be computed."""
        return 0 if self.known >= self.limit else self.known - self.computed

    @property
    def decoding(self) -> bool:
        """One token behind, and so one step away from the next token of the answer: `todo` is 1, and it is no prompt
        of one token. Asked for every running request in every step, so it is spelled out."""
        known = len(self.tokens) + self.pending
        return known - self.computed == 1 and self.computed > 0 and known < self.limit

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def __repr__(self) -> str:
        return f"TokenCursor({self.id}, computed={self.computed}, known={self.known}, row={self.row})"
