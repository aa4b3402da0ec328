"""The names that a server may be called by.

A page in a browser can make any name of its own lead to this machine. A server that only this machine reaches, and
that wants no key, is safe from it only when it does not answer to such names.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from weft.config import ServerOptions
from weft.errors import InvalidRequest
from weft.frontend.errors import WrongHost

LOCALHOST = "localhost"


def is_loopback(host: str) -> bool:
    """Whether this is a name or an address of this machine that no other machine reaches."""
    try:
        return host == LOCALHOST or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class HostCheck:
    def __init__(self, options: ServerOptions, *, keys_required: bool) -> None:
        self._is_guarded = is_loopback(options.host) and not keys_required and not options.insecure
        self._allowed: Collection[str] = {name.lower() for name in options.allowed_host}

    def refusal(self, hosts: list[bytes], http_version: str) -> InvalidRequest | None:
        """None when a request with these Host headers may go on."""
        if len(hosts) > 1 or (not hosts and http_version not in ("0.9", "1.0")):
            return InvalidRequest("A request has one Host header.")
        if not self._is_guarded:
            return None
        name = _name(hosts[0].decode("latin-1")) if hosts else ""
        if is_loopback(name) or name in self._allowed:
            return None
        return WrongHost(
            "This server has no keys, and answers only to names of this machine.",
            hint="Call it localhost; or the operator adds the name with --allowed-host.",
        )


def _name(host: str) -> str:
    """Without the port, as it is compared."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")
