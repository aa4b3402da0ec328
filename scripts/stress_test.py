"""The same as `python -m weft.bench.scripts.stress_test`."""

from weft.bench.scripts.stress_test import app

if __name__ == "__main__":
    app()
