"""A file of API keys: one a line, alone or behind a name (`team: KEY`, `team KEY`); # begins a comment."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

from weft.errors import ConfigError

MAX_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class KeyLine(Struct, frozen=True):
    key: str
    name: str
    """Empty: the key has none."""


class KeyFile:
    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._seen = self._state()

    def has_changed(self) -> bool:
        """Since it was last read, as far as its size and its times tell."""
        return self._state() != self._seen

    def read(self) -> list[KeyLine]:
        """Raises ConfigError for a file that cannot be read, or has a line that is no key."""
        self._seen = self._state()
        try:
            with self._path.open("rb") as file:
                text = file.read(MAX_BYTES + 1).decode()
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}.", hint="It is to hold API keys.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._path}: this is no text.", hint="It is to hold API keys.") from error
        if len(text) > MAX_BYTES:
            raise ConfigError(f"{self._path}: this is larger than a file of keys can be.")
        lines = [
            self._parsed(line, number) for number, line in enumerate(text.splitlines(), 1) if not _is_comment(line)
        ]
        if len({line.key for line in lines}) < len(lines):
            raise ConfigError(f"{self._path}: a key is there twice.", hint="A key has one owner.")
        return lines

    def _parsed(self, line: str, number: int) -> KeyLine:
        # What is wrong is never quoted: it may be a key.
        match line.split():
            case [key]:
                return KeyLine(key, "")
            case [name, key]:
                name = name.removesuffix(":")
                if not _NAME.fullmatch(name):
                    raise ConfigError(
                        f"{self._path}, line {number}: a name is letters, digits, dots, dashes and underscores."
                    )
                return KeyLine(key, name)
        raise ConfigError(f"{self._path}, line {number}: a line is a key, or a name and a key.")

    def _state(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def _is_comment(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")
