"""API keys, the same for every door: who has one comes in."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from weft.errors import ConfigError

HOW = "authorization: Bearer KEY, or x-api-key: KEY"
_BEARER = "bearer "


class Keys:
    """Digests of the keys. Whether a key is right takes the same time to say however wrong it is."""

    def __init__(self, keys: Sequence[str]) -> None:
        if not all(key.strip() == key and key for key in keys):
            raise ConfigError("An API key is empty, or has space around it.", hint="Set --api-key or WEFT_API_KEY.")
        self._digests = [_digest(key) for key in keys]

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def know(self, key: str) -> bool:
        presented = _digest(key)
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        return any(matches)


def presented(headers: Iterable[tuple[str, str | bytes]]) -> Iterable[str]:
    """The keys among headers, or a call's metadata; names are in lower case."""
    for name, value in headers:
        if not isinstance(value, str):
            continue
        if name == "x-api-key":
            yield value
        elif name == "authorization" and value[: len(_BEARER)].lower() == _BEARER:
            yield value[len(_BEARER) :]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
