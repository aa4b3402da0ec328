"""The same as `python -m weft.bench.scripts.monitor_grpc_messages`."""

from weft.bench.scripts.monitor_grpc_messages import app
from weft.bench.scripts.subject import main

if __name__ == "__main__":
    main(app)
