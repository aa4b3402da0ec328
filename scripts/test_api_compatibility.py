"""The same as `python -m weft.bench.scripts.test_api_compatibility`."""

from weft.bench.scripts.subject import main
from weft.bench.scripts.test_api_compatibility import app

if __name__ == "__main__":
    main(app)
