"""The same as `python -m weft.bench.scripts.load_test_grpc`."""

from weft.bench.scripts.load_test_grpc import app
from weft.bench.scripts.subject import main

if __name__ == "__main__":
    main(app)
