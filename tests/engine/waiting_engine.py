"""An engine process that does nothing, for good."""

from __future__ import annotations

import signal


def main() -> None:
    signal.pause()
