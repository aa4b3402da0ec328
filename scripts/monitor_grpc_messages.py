"""The same as `python -m weft.bench.scripts.monitor_grpc_messages`."""

from weft.bench.scripts.monitor_grpc_messages import app

if __name__ == "__main__":
    app()
