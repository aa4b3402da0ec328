"""Compare two reports: `--before` and `--after`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.bench.load_commands import compare_files
from weft.bench.scripts.subject import Output, command, main


def compare_reports(
    before: Annotated[Path, typer.Option(help="A report of benchmark_token_speed or weft bench serve.")],
    after: Annotated[Path, typer.Option(help="Another of the same load.")],
    tolerance: Annotated[float, typer.Option(min=0, help="A difference of this share is none.")] = 0.02,
    output: Output = None,
) -> None:
    """Compare two reports, figure by figure, with confidence intervals. The exit code is 1 where the second is
    worse."""
    compare_files(before, after, tolerance, output)


app = command(compare_reports)

if __name__ == "__main__":
    main(app)
