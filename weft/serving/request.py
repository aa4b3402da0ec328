"""What the engine is asked for by one request of a door."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from weft.backends.contract import Prompt
from weft.types import SamplingParams


class Choice(Struct, frozen=True):
    """One answer to one prompt."""

    prompt: Prompt
    params: SamplingParams
    leader: int | None
    """The first choice of the same prompt, whose cached blocks this one shares; None: it is the first itself."""


class Job(Struct, frozen=True, kw_only=True):
    """Every prompt gives `n` choices of the answer, one after the other."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    n: int = 1
    cache_salt: str = ""
    priority: int = 0
    adapter: str | None = None
    """As in `Terms`."""
    model_name: str
    """As the client called it: one of the operator's names."""
    stream: bool = False
    markers: tuple[str, ...] = ()
    """Texts of special tokens that the answer's reader must see."""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def choices(self) -> list[Choice]:
        choices: list[Choice] = []
        for prompt in self.prompts:
            first = len(choices)
            choices.append(Choice(prompt, self.params, None))
            choices += [Choice(prompt, _sibling(self.params, number), first) for number in range(1, self.n)]
        return choices


def _sibling(params: SamplingParams, number: int) -> SamplingParams:
    """With a seed of its own, or all choices would be alike. The prompt's figures come with the first choice."""
    seed = None if params.seed is None else nth_seed(params.seed, number)
    return replace(params, seed=seed, prompt_logprobs=None)


def nth_seed(seed: int, number: int) -> int:
    """Of the answer of this number to one request, within 64 bits."""
    return (seed + number + 2**63) % 2**64 - 2**63
