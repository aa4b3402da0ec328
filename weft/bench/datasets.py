"""Datasets say what the requests of a load ask for. A seed draws the same again: two servers are asked the same."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from weft.bench.arrivals import Size, log_normal
from weft.errors import ConfigError

DatasetName = Literal["random", "chat", "prefix", "multi-turn", "long", "images", "standard"]
FIRST_TOKEN_ID = 10
"""Ids below are, in most vocabularies, special tokens."""

WORDS = (  # noqa: SIM905 - to be read
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information"
).split()


class DialogueTurn(Struct, frozen=True, kw_only=True):
    """One request: its path and its body, but for the model and for what all requests of a load have."""

    path: str
    body: Mapping[str, Any]
    output_tokens: int = 0
    """The answer has exactly so many tokens; 0: as many as it likes, up to its max_tokens."""


class Dialogue(Struct, frozen=True):
    """Turns of which each is sent when the one before it is answered, with all that was said before."""

    turns: Sequence[DialogueTurn]


class DatasetSpec(Struct, frozen=True, kw_only=True):
    """A dataset, and the sizes that it is drawn with."""

    name: DatasetName = "random"
    file: str = ""
    """Requests of one's own instead, in lines of JSON: `prompt` or `messages`, and `max_tokens`."""
    input_tokens: Size = Size(128, 128)
    output_tokens: Size = Size(256, 256)
    prefix_tokens: int = 1024
    """Tokens that the prompts of a group share."""
    groups: int = 8
    """Groups of prompts with a prefix of their own."""
    num_turns: int = 4
    vocabulary: int = 10_000
    """Prompts of token ids are made of ids below this."""
    image_size: str = ""
    image_steps: int = 0

    def __str__(self) -> str:
        if self.file:
            return Path(self.file).name
        sizes = f"{self.input_tokens}:{self.output_tokens}"
        match self.name:
            case "random" | "long":
                return sizes
            case "prefix":
                return f"prefix {self.prefix_tokens}+{sizes}"
            case "multi-turn":
                return f"{self.num_turns} turns {sizes}"
        return self.name


def dialogues(spec: DatasetSpec, chance: random.Random) -> Iterator[Dialogue]:
    """Yield dialogues for ever."""
    if spec.file:
        return _from_file(Path(spec.file))
    match spec.name:
        case "random" | "long":
            return _random_ids(spec, chance)
        case "prefix":
            return _shared_prefixes(spec, chance)
        case "chat":
            return _chats(chance)
        case "multi-turn":
            return _multi_turn(spec, chance)
        case "images":
            return _images(spec, chance)
        case "standard":
            return _standard(spec)


def _random_ids(spec: DatasetSpec, chance: random.Random) -> Iterator[Dialogue]:
    """Prompts of random token ids, none of them twice, so that no cache can help."""
    while True:
        yield _completion(_ids(spec, spec.input_tokens.draw(chance), chance), spec.output_tokens.draw(chance))


def _shared_prefixes(spec: DatasetSpec, chance: random.Random) -> Iterator[Dialogue]:
    prefixes = [_ids(spec, spec.prefix_tokens, chance) for _ in range(spec.groups)]
    while True:
        own = _ids(spec, spec.input_tokens.draw(chance), chance)
        yield _completion(chance.choice(prefixes) + own, spec.output_tokens.draw(chance))


def _ids(spec: DatasetSpec, count: int, chance: random.Random) -> list[int]:
    return [chance.randrange(FIRST_TOKEN_ID, spec.vocabulary) for _ in range(count)]


def _completion(prompt: list[int], output_tokens: int) -> Dialogue:
    body = {"prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True}
    return Dialogue([DialogueTurn(path="/v1/completions", body=body, output_tokens=output_tokens)])


def _chats(chance: random.Random) -> Iterator[Dialogue]:
    """Chats with lengths as people's have them: a median of 60 words, and of 150 tokens in the answer."""
    while True:
        words = log_normal(60, 1.0, 2_000, chance)
        yield Dialogue([_chat(_text(words, chance), log_normal(150, 0.8, 1_000, chance))])


def _multi_turn(spec: DatasetSpec, chance: random.Random) -> Iterator[Dialogue]:
    while True:
        sizes = [(spec.input_tokens.draw(chance), spec.output_tokens.draw(chance)) for _ in range(spec.num_turns)]
        yield Dialogue([_chat(_text(words, chance), tokens) for words, tokens in sizes])


def _chat(content: str, output_tokens: int) -> DialogueTurn:
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": output_tokens,
        "ignore_eos": True,
    }
    return DialogueTurn(path="/v1/chat/completions", body=body, output_tokens=output_tokens)


def _text(words: int, chance: random.Random) -> str:
    """Return words of which most tokenizers make one token each."""
    return " ".join(chance.choices(WORDS, k=words))


def _images(spec: DatasetSpec, chance: random.Random) -> Iterator[Dialogue]:
    while True:
        body: dict[str, Any] = {"prompt": _text(8, chance), "seed": chance.randrange(1 << 31), "n": 1}
        if spec.image_size:
            body["size"] = spec.image_size
        if spec.image_steps:
            body["num_inference_steps"] = spec.image_steps
        yield Dialogue([DialogueTurn(path="/v1/images/generations", body=body)])


class StandardPrompt(Struct, frozen=True):
    id: str
    kind: str
    prompt: str


def standard_prompts() -> list[StandardPrompt]:
    """Return the prompts that the CY-LLM Engine's own benchmarks use."""
    data = files("weft").joinpath("data/standard_prompts.json").read_bytes()
    return msgspec.json.decode(data, type=list[StandardPrompt])


def _standard(spec: DatasetSpec) -> Iterator[Dialogue]:
    def chat(prompt: str) -> Dialogue:
        messages = [{"role": "user", "content": prompt}]
        body = {"messages": messages, "max_completion_tokens": spec.output_tokens.most}
        return Dialogue([DialogueTurn(path="/v1/chat/completions", body=body)])

    return cycle([chat(each.prompt) for each in standard_prompts()])


class _FileRequest(Struct, forbid_unknown_fields=True):
    prompt: str | list[int] | UnsetType = UNSET
    messages: list[dict[str, Any]] | UnsetType = UNSET
    max_tokens: int | UnsetType = UNSET
    ignore_eos: bool | UnsetType = UNSET


def _from_file(file: Path) -> Iterator[Dialogue]:
    try:
        lines = [line for line in file.read_bytes().splitlines() if line.strip()]
        asked = [msgspec.json.decode(line, type=_FileRequest) for line in lines]
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{file} holds no requests: {error}.", hint="A line is {'messages': […]} in JSON.") from error
    if not asked or any((each.prompt is UNSET) == (each.messages is UNSET) for each in asked):
        raise ConfigError(f"{file}: every line needs either a prompt or messages.")
    paths = ("/v1/completions" if each.messages is UNSET else "/v1/chat/completions" for each in asked)
    turns = [DialogueTurn(path=path, body=msgspec.to_builtins(each)) for path, each in zip(paths, asked, strict=True)]
    return cycle([Dialogue([turn]) for turn in turns])
