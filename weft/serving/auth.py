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

from weft.errors import ConfigError, InvalidRequest

MAX_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PRIORITY = "priority="
_RANGE = re.compile(r"priority=(-?[0-9]{1,9})\.\.(-?[0-9]{1,9})")


class PriorityRange(Struct, frozen=True):
    """The priorities that the requests of a key may have."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}..{self.high}"


class KeyLine(Struct, frozen=True):
    key: str
    name: str
    """Empty: the key has none."""
    priorities: PriorityRange | None = None
    """None: any."""


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
            raise ConfigError(f"{self._path}: this is not a text file.", hint="It is to hold API keys.") from error
        if len(text) > MAX_BYTES:
            raise ConfigError(f"{self._path}: this is larger than a file of keys can be.")
        lines = [
            self._parsed(line, number) for number, line in enumerate(text.splitlines(), 1) if not _is_comment(line)
        ]
        if len({line.key for line in lines}) < len(lines):
            raise ConfigError(f"{self._path}: a key is there twice.", hint="A key has one owner.")
        ranges = {(line.name, line.priorities) for line in lines if line.name}
        if len(ranges) > len({name for name, _ in ranges}):
            raise ConfigError(
                f"{self._path}: keys of one name have different priorities.", hint="A name has one range, or none."
            )
        return lines

    def _parsed(self, line: str, number: int) -> KeyLine:
        # What is wrong is never quoted: it may be a key.
        parts = line.split()
        priorities = self._range(parts.pop(), number) if parts[-1].startswith(_PRIORITY) else None
        match parts:
            case [key]:
                return KeyLine(key, "", priorities)
            case [name, key]:
                name = name.removesuffix(":")
                if not _NAME.fullmatch(name):
                    raise ConfigError(
                        f"{self._path}, line {number}: a name is letters, digits, dots, dashes and underscores."
                    )
                return KeyLine(key, name, priorities)
        raise ConfigError(
            f"{self._path}, line {number}: a line is a key, or a name and a key, and may end with priority=LOW..HIGH."
        )

    def _range(self, text: str, number: int) -> PriorityRange:
        match = _RANGE.fullmatch(text)
        if match is None or (found := PriorityRange(int(match[1]), int(match[2]))).low > found.high:
            raise ConfigError(f"{self._path}, line {number}: priorities are two numbers, as in priority=-5..5.")
        return found

    def _state(self) -> tuple[int, int, int] | None:
        return file_state(self._path)


def file_state(path: Path) -> tuple[int, int, int] | None:
    """Return what differs when a file has changed; None: there is none."""
    try:
        status = path.stat()
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
        self._ranges: dict[str, PriorityRange] = {}
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

    def priority_of(self, tenant: str, asked: int, *, has_shares: bool) -> int:
        """Return the priority of a tenant's request; where it asks for none, the one nearest to 0 in its key's range.
        Raises InvalidRequest for one that its key may not have. `has_shares`: tenants have equal shares of the engine
        whatever their priorities are, so that a key without a range may have any."""
        allowed = self._ranges.get(tenant)
        if allowed is not None:
            if asked and not allowed.low <= asked <= allowed.high:
                raise InvalidRequest(
                    f"priority is {asked}; this key may ask for {allowed}.",
                    hint="The operator's setting is in --api-key-file.",
                    param="priority",
                )
            return min(max(asked, allowed.low), allowed.high)
        if asked and not has_shares and len({key.name for key in self._all}) > 1:
            raise InvalidRequest(
                "priority: this engine has no equal shares for keys, and this key has no range of priorities.",
                hint="The operator can give it one in --api-key-file, as in priority=-5..5.",
                param="priority",
            )
        return asked

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
        lines = file.read()
        self._all = self._given + [_key(line.key, line.name) for line in lines]
        names = (key.name for key in self._all[len(self._given) :])
        self._ranges = {
            name: line.priorities for name, line in zip(names, lines, strict=True) if line.priorities is not None
        }


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
