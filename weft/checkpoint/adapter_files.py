"""The files of LoRA adapters as PEFT writes them: how settings name their directories, and how their configuration
names modules of a model."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from weft.checkpoint.model_files import home
from weft.errors import ConfigError, InvalidRequest, ModelError
from weft.options import Config

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 64
HELD_PER_NUMBER = 2
"""Numbers in memory for each number in the file: on CPUs the weights are there once more, as native code reads them."""
DEFAULT_ADAPTER = "default"
"""The name of an adapter that was given without one: requests that name no adapter use it."""


def adapter_paths(config: Config) -> dict[str, str]:
    """Return the directories of `--adapter` by name."""
    paths: dict[str, str] = {}
    for said in config.model.adapter:
        name, _, path = said.partition("=") if "=" in said else (DEFAULT_ADAPTER, "", said)
        if not name or not path or name in paths:
            raise ConfigError(f"--adapter {said}: it must be NAME=DIRECTORY, with different names.")
        paths[name] = path
    return paths


def allowed_adapter(path: str, config: Config) -> str:
    """Return the directory of an adapter, with all links followed. Raises InvalidRequest where it, or one of its files,
    is not below a folder that adapters may be loaded from while the server runs."""
    roots = [*(config.server.adapter_root or [str(home())]), *adapter_paths(config).values()]
    allowed = [Path(root).expanduser().resolve() for root in roots]
    try:
        folder = Path(path).expanduser().resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, a user who is not there, links in a circle
        raise InvalidRequest("lora_path is not the path of a folder.", param="lora_path") from error
    for place in (folder, (folder / CONFIG_FILE).resolve(), (folder / WEIGHTS_FILE).resolve()):
        if not any(place.is_relative_to(root) for root in allowed):
            raise InvalidRequest(
                "lora_path is not in a folder that adapters may be loaded from.",
                hint="The operator names such folders with --adapter-root.",
                param="lora_path",
            )
    return str(folder)


def adapter_settings(paths: Mapping[str, str]) -> list[str]:
    """Write directories by name as `--adapter` takes them."""
    return [f"{name}={path}" for name, path in paths.items()]


MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERN_CHARACTERS = 4000
"""Characters of all patterns of an adapter that are more than names: each is tried with every module of the model."""
MAX_GROUPS = 8
"""How deep groups may be nested in a pattern."""
WORD = string.ascii_letters + string.digits + "_"
LITERAL = f"{WORD}-"
CLASSES = {
    r"\d": string.digits, r"\w": WORD, r"\.": ".", "0-9": string.digits, "a-z": string.ascii_lowercase,
    "A-Z": string.ascii_uppercase,
}  # fmt: skip
"""The sets of characters that a pattern can name, inside of brackets or, those with a backslash, outside of them."""

_NAME = re.compile(r"[A-Za-z0-9_.-]*")

Places = set[int]
Part = Callable[[str, Places], Places]
"""A part of a pattern returns where it may end in a name, given all the places where it may begin."""


class ModulePattern:
    r"""A pattern of module names. Adapters are written by others, and PEFT's patterns are regular expressions: this is
    the part of their syntax that is matched in a time that grows with the pattern's length times the name's. It has
    letters, digits, `_`, `-`, `.`, `\.`, `\d`, `\w`, `[...]` and `\b`; `*`, `+`, `{1,}` and `?` after one character;
    groups of alternatives, with `?` at most. Raises ModelError for anything else."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._rest = pattern.removeprefix("^").removesuffix("$")
        self._starts_at_first = pattern.startswith("^")
        self._whole = self._alternatives(0)
        if self._rest:
            raise self._refusal("a ) without its (")

    def matches(self, name: str) -> bool:
        return len(name) in self._whole(name, {0})

    def ends(self, name: str) -> bool:
        """Return whether it matches the name, or the end of it after a dot."""
        starts = {0} if self._starts_at_first else {0, *(i + 1 for i, c in enumerate(name) if c == ".")}
        return len(name) in self._whole(name, starts)

    def _alternatives(self, depth: int) -> Part:
        parts = [self._sequence(depth)]
        while self._took("|"):
            parts.append(self._sequence(depth))
        return lambda name, starts: {end for part in parts for end in part(name, starts)}

    def _sequence(self, depth: int) -> Part:
        parts: list[Part] = []
        while self._rest and self._rest[0] not in "|)":
            parts.append(self._group(depth + 1) if self._took("(") else self._boundary() or self._characters())

        def ends(name: str, starts: Places) -> Places:
            for part in parts:
                starts = part(name, starts)
            return starts

        return ends

    def _group(self, depth: int) -> Part:
        self._took("?:")
        if depth > MAX_GROUPS:
            raise self._refusal(f"groups are nested more than {MAX_GROUPS} deep")
        inner = self._alternatives(depth)
        if not self._took(")"):
            raise self._refusal("a ( without its )")
        if self._rest.startswith(("*", "+", "{")):
            raise self._refusal("a group is repeated")
        return (lambda name, starts: starts | inner(name, starts)) if self._took("?") else inner

    def _boundary(self) -> Part | None:
        if not self._took(r"\b"):
            return None
        return lambda name, starts: {i for i in starts if _is_word(name, i - 1) != _is_word(name, i)}

    def _characters(self) -> Part:
        """Read one character, or a set of them, and how often it may stand there."""
        accepted = self._accepted()
        repeats = self._took("*") or self._took("+") or self._took("{1,}")
        may_miss = repeats == "*" or (not repeats and bool(self._took("?")))
        if repeats:
            self._took("?")  # the shortest run first: whether there is one does not depend on it

        def ends(name: str, starts: Places) -> Places:
            found = set(starts) if may_miss else set()
            last = -1
            for start in sorted(starts):
                end = max(start, last)
                while end < len(name) and accepted(name[end]):
                    end += 1
                    found.add(end)
                    if not repeats:
                        break
                last = end if repeats else -1
            return found

        return ends

    def _accepted(self) -> Callable[[str], bool]:
        if self._took("."):
            return lambda character: True
        if self._took("["):
            written, closed, self._rest = self._rest.partition("]")
            negated = written.startswith("^")
            characters = written.removeprefix("^")
            for name, meant in CLASSES.items():
                characters = characters.replace(name, meant)
            if not closed or not characters or not set(characters) <= set(WORD + "."):
                raise self._refusal(f"{'[' + written:.40}{closed} is not supported")
            return lambda character: (character in characters) != negated
        for name, meant in CLASSES.items():
            if name[0] == "\\" and self._took(name):
                return meant.__contains__
        literal, self._rest = self._rest[0], self._rest[1:]
        if literal not in LITERAL:
            raise self._refusal(f"{literal + self._rest[:1]!r} is not supported")
        return literal.__eq__

    def _took(self, text: str) -> str:
        """Take a text from the front of what is left; empty: it is not there."""
        if not self._rest.startswith(text):
            return ""
        self._rest = self._rest[len(text) :]
        return text

    def _refusal(self, what: str) -> ModelError:
        return ModelError(
            f"the pattern {self._pattern!r:.100} cannot be used: {what}.",
            hint="Write the names of the modules as a list, or a simple pattern as in .*\\.(q_proj|v_proj).",
        )


def _is_word(name: str, place: int) -> bool:
    return 0 <= place < len(name) and name[place] in WORD


@lru_cache(maxsize=256)
def module_pattern(pattern: str) -> ModulePattern:
    return ModulePattern(pattern)


def is_name(pattern: str) -> bool:
    """Return whether a pattern is a name alone; its dots are dots."""
    return _NAME.fullmatch(pattern) is not None
