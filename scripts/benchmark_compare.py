"""The same as `python -m weft.bench.scripts.benchmark_compare`."""

from weft.bench.scripts.benchmark_compare import app
from weft.bench.scripts.subject import main

if __name__ == "__main__":
    main(app)
