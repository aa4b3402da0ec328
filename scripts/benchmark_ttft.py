"""The same as `python -m weft.bench.scripts.benchmark_ttft`."""

from weft.bench.scripts.benchmark_ttft import app

if __name__ == "__main__":
    app()
