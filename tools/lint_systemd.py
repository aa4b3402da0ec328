"""Checks a systemd unit: python tools/lint_systemd.py FILE. It does nothing where there is no systemd-analyze.

`systemd-analyze verify` wants every program to be there. So a copy is checked, whose program is one that is here.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    unit = Path(sys.argv[1])
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        sys.stderr.write(f"{unit}: not checked, there is no systemd-analyze here\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / unit.name
        copy.write_text(re.sub(r"^(ExecStart=)\S+", rf"\g<1>{sys.executable}", unit.read_text(), flags=re.MULTILINE))
        done = subprocess.run([analyze, "verify", copy], capture_output=True, text=True, check=False)
    # Warnings leave the exit code as it is; a line about this unit is one.
    told = [line for line in done.stderr.splitlines() if unit.name in line]
    sys.stderr.write("".join(f"{line}\n" for line in told))
    return 1 if told or done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
