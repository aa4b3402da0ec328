"""The same as `python -m weft.bench.scripts.benchmark_token_speed`."""

from weft.bench.scripts.benchmark_token_speed import app

if __name__ == "__main__":
    app()
