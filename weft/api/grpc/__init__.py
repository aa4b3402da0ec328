"""The gRPC endpoint. `serve_rpc` in `grpc_server` opens it; `ai_service.proto` defines its messages."""

import os

# gRPC's own library writes to the terminal what Weft says in its errors; an operator who wants both sets it.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
