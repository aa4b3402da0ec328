"""The same as `python -m weft.bench.scripts.benchmark_compare`."""

from weft.bench.scripts.benchmark_compare import app

if __name__ == "__main__":
    app()
