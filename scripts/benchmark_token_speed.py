"""The same as `python -m weft.bench.scripts.benchmark_token_speed`."""

from weft.bench.scripts.benchmark_token_speed import app
from weft.bench.scripts.subject import main

if __name__ == "__main__":
    main(app)
