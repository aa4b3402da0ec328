"""API keys, the same for every endpoint: a request with one comes in under the name that the operator gave the key."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
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
        """Return whether it changed since it was last read, as far as its size and its times tell."""
        return self._state() != self._seen

    def read(self) -> list[KeyLine]:
        """Read the keys. Raises ConfigError for a file that cannot be read, or has a line that is no key."""
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


log = logging.getLogger(__name__)

HOW = "authorization: Bearer KEY, or x-api-key: KEY"
_BEARER = "bearer "

POLL_S = 1.0
"""How often, at most, the file is looked at."""


class _Key(Struct, frozen=True):
    digest: bytes
    name: str


class Keys:
    """The keys, as digests. Whether a key is right takes the same time to say however wrong it is."""

    def __init__(self, keys: Sequence[str], file: str = "", *, clock: Callable[[], float] = time.monotonic) -> None:
        if not all(key.strip() == key and key for key in keys):
            raise ConfigError("An API key is empty, or has space around it.", hint="Set --api-key or WEFT_API_KEY.")
        self._given = [_key(key) for key in keys]
        self._file = KeyFile(file) if file else None
        self._clock = clock
        self._next_look = 0.0
        self._all: list[_Key] = self._given
        if self._file is not None:
            self._read(self._file)

    @property
    def required(self) -> bool:
        """True when a key is wanted: a file without keys lets no request in."""
        return bool(self._given) or self._file is not None

    def owner(self, shown: Iterable[str]) -> str | None:
        """Return the name of the first right key among those shown; None when none is right."""
        self._look()
        for key in shown:
            presented = _digest(key)
            matches = [known.name for known in self._all if hmac.compare_digest(presented, known.digest)]
            if matches:
                return matches[0]
        return None

    def reload(self) -> int:
        """Read the file again, changed or not, and return how many keys there are. Raises ConfigError when it is
        broken; the keys are those from before, then."""
        if self._file is not None:
            self._read(self._file)
        return len(self._all)

    def _look(self) -> None:
        """Take in a file that has changed; one that is broken changes nothing."""
        if self._file is None or self._clock() < self._next_look:
            return
        self._next_look = self._clock() + POLL_S
        if self._file.has_changed():
            try:
                self._read(self._file)
            except ConfigError as error:
                log.error("the keys stay as they were: %s", error)
            else:
                log.info("keys were read again: %d", len(self._all))

    def _read(self, file: KeyFile) -> None:
        self._all = self._given + [_key(line.key, line.name) for line in file.read()]


def presented(headers: Iterable[tuple[str, str | bytes]]) -> Iterable[str]:
    """Yield the keys among headers, or a call's metadata; names are in lower case."""
    for name, value in headers:
        if not isinstance(value, str):
            continue
        if name == "x-api-key":
            yield value
        elif name == "authorization" and value[: len(_BEARER)].lower() == _BEARER:
            yield value[len(_BEARER) :]


def _key(key: str, name: str = "") -> _Key:
    digest = _digest(key)
    return _Key(digest, name or digest.hex()[:8])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
