"""The times at which the requests of a load are sent: each as soon as one before it is answered (a closed loop), or at
times of their own, whatever the server does (an open loop)."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from weft.errors import ConfigError

Arrival = Literal["poisson", "constant", "bursty"]

BURSTINESS = 0.25
"""The shape of the gamma distribution that bursty gaps have: smaller is burstier, 1 is Poisson's."""


class Load(Struct, frozen=True, kw_only=True):
    """A number of requests, and when each is sent."""

    requests: int = 0
    seconds: float = 0.0
    """In a closed loop, instead of a number of requests: none is begun later than this."""
    connections: int = 0
    """In a closed loop: so many ask, again and again. In an open loop: at most so many are open, and what comes
    meanwhile waits; 0: any number."""
    rate: float = 0.0
    """Requests a second; 0: a closed loop."""
    rate_at_end: float = 0.0
    """The rate rises or falls to this by the last request; 0: it stays."""
    arrival: Arrival = "poisson"

    def __str__(self) -> str:
        if not self.rate:
            return f"{self.connections} connections"
        ramp = f" to {self.rate_at_end:g}" if self.rate_at_end else ""
        return f"{self.rate:g}{ramp}/s {self.arrival}" + (f", {self.connections} open" if self.connections else "")

    def times(self, chance: random.Random) -> Iterator[float]:
        """Yield the second at which each request of an open loop is sent. The first is sent at once."""
        at = 0.0
        for number in range(self.requests):
            yield at
            at += self._gap(chance) / self._rate_after(number)

    def _rate_after(self, number: int) -> float:
        share = number / max(1, self.requests - 1)
        return self.rate + share * ((self.rate_at_end or self.rate) - self.rate)

    def _gap(self, chance: random.Random) -> float:
        """Return a gap whose mean is 1."""
        match self.arrival:
            case "constant":
                return 1.0
            case "poisson":
                return chance.expovariate(1.0)
            case "bursty":
                return chance.gammavariate(BURSTINESS, 1 / BURSTINESS)


class Size(Struct, frozen=True):
    """A number of tokens, or the bounds between which every request has its own."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Size:
        """Parse `128` or `64-256`."""
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", text)
        least = int(found[1]) if found else 0
        most = int(found[2] or least) if found else 0
        if not 0 < least <= most:
            raise ConfigError(
                f"{text!r} is not a number of tokens.", hint="Write 128, or 64-256 for any number between."
            )
        return cls(least, most)

    def draw(self, chance: random.Random) -> int:
        return chance.randint(self.least, self.most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


def log_normal(median: float, spread: float, most: int, chance: random.Random) -> int:
    """Draw a length as people's texts have them: most are short, a few are very long."""
    return max(1, min(most, round(chance.lognormvariate(math.log(median), spread))))
