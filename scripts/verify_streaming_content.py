"""The same as `python -m weft.bench.scripts.verify_streaming_content`."""

from weft.bench.scripts.subject import main
from weft.bench.scripts.verify_streaming_content import app

if __name__ == "__main__":
    main(app)
