"""How hard the tests that try things at random try: `make test` a sample, `make test-thorough` ten times as much."""

from __future__ import annotations

import os

EFFORT = int(os.environ.get("TEST_EFFORT", "1"))
