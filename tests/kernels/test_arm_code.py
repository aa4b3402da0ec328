"""What the compiler makes of Arm's kernels, on whatever processor this is."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytest.importorskip("numba")


@pytest.mark.parametrize("kind", [1, 2, 3, 4])
def test_products_of_panels_take_inputs_from_lanes_and_put_no_register_aside(kind: int) -> None:
    command = [sys.executable, "-m", "tests.kernels.arm_code", f"weft_panel_linear_{kind}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    products = re.findall(r"\bsdot\s.*", done.stdout)
    # Eight for a block of each of 8, 4, 2 and 1 inputs.
    assert len(products) == 8 * 15
    assert all(re.search(r"\.4b\[[0-3]\]$", one) for one in products)
    assert not re.findall(r".*\bq\d+, .*\[sp.*", done.stdout), "vectors are put on the stack"
