"""The same as `python -m weft.bench.scripts.stress_test`."""

from weft.bench.scripts.stress_test import app
from weft.bench.scripts.subject import main

if __name__ == "__main__":
    main(app)
