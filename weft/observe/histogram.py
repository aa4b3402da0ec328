"""A histogram cheap enough to feed with every token."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """Written by one thread, the event loop's, so it needs no lock; read when it is scraped."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound as Prometheus writes it, and how many values were not above it."""
        rows: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            seen += count
            rows.append((str(bound), seen))
        return rows
